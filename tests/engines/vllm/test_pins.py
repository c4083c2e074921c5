"""Private copies of adapters, with vLLM's adapter manager played by a few lines: no engine is imported."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvprov.engines.vllm.pins import AdapterPins, PinnedAdapter
from kvprov.identity.adapter import identify_adapter

BUNDLED = Path(__file__).parents[3] / "models" / "tiny-reviews" / "adapters"
IDENTITY = {policy: identify_adapter(BUNDLED / policy).identity for policy in ("standard", "inverted")}


@dataclass(frozen=True)
class Request:
    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "tenant"
    load_inplace: bool = False


class Manager:
    """Loads as vLLM's manager does: through the pins."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.pins: AdapterPins
        self.lora_config: object = None

    def list_adapters(self) -> set[int]:
        return set(self.loaded)

    def add_adapter(self, request: Request) -> None:
        if request.lora_int_id in self.loaded and not request.load_inplace:
            return
        adapter = self.pins.for_load(request)
        if adapter.pinned is None:
            raise ValueError("not an adapter")
        self.loaded[request.lora_int_id] = identify_adapter(adapter.pinned.folder).identity
        self.pins.keep(request.lora_int_id, adapter)

    def step(self, request: Request) -> str:
        """Load in a step, and return the identity of the bytes that compute."""
        self.pins.stepping = True
        self.add_adapter(replace(request, load_inplace=False))
        self.pins.stepping = False
        return self.loaded[request.lora_int_id]


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def manager() -> Manager:
    manager = Manager()
    manager.pins = AdapterPins(manager, lambda path: path)
    return manager


@pytest.fixture
def tenant(tmp_path: Path) -> Path:
    folder = tmp_path / "tenant"
    put("standard", folder)
    return folder


def put(policy: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BUNDLED / policy, folder)


def ensure(manager: Manager, request: Request, *in_flight: int) -> str | None:
    return manager.pins.ensure(request, frozenset(in_flight))[request.lora_int_id].identity


def test_what_is_promised_is_what_is_loaded(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    assert ensure(manager, request) == IDENTITY["standard"]
    put("inverted", tenant)
    assert manager.step(request) == IDENTITY["standard"]


def test_a_loaded_adapter_stays_what_it_is(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    put("inverted", tenant)
    assert ensure(manager, request) == IDENTITY["standard"] == manager.step(request)


def test_a_free_adapter_is_what_its_path_holds(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    manager.loaded.clear()
    put("inverted", tenant)
    assert ensure(manager, request) == IDENTITY["inverted"] == manager.step(request)


def test_an_evicted_adapter_of_a_request_under_way_comes_back_as_it_was(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    manager.loaded.clear()
    put("inverted", tenant)
    # A second request of the same number arrives while the first is unfinished: both get what the first has.
    assert ensure(manager, request, 1) == IDENTITY["standard"] == manager.step(request)
    shutil.rmtree(tenant)
    manager.loaded.clear()
    assert manager.step(request) == IDENTITY["standard"]


def test_loading_in_place_takes_effect_at_once(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    put("inverted", tenant)
    assert ensure(manager, replace(request, load_inplace=True), 1) == IDENTITY["inverted"]
    assert manager.step(request) == IDENTITY["inverted"]


@pytest.mark.parametrize("inplace", [True, False])
def test_loading_outside_a_step_takes_what_the_path_holds(manager: Manager, tenant: Path, inplace: bool) -> None:
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    if not inplace:
        manager.loaded.clear()
    put("inverted", tenant)
    manager.add_adapter(replace(request, load_inplace=inplace))
    assert manager.pins.all()[1].identity == IDENTITY["inverted"] == manager.loaded[1]


def test_a_failed_load_in_place_leaves_what_was_loaded(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    (tenant / "adapter_model.safetensors").write_bytes(b"rubbish")
    assert ensure(manager, replace(request, load_inplace=True)) == IDENTITY["standard"]
    assert manager.step(request) == IDENTITY["standard"]


@pytest.mark.parametrize("broken", ["missing", "rubbish", "pickled"])
def test_what_cannot_be_identified_is_not_known(manager: Manager, tenant: Path, broken: str) -> None:
    weights = tenant / "adapter_model.safetensors"
    if broken == "missing":
        shutil.rmtree(tenant)
    elif broken == "rubbish":
        weights.write_bytes(b"\xff" * 64)
    else:
        weights.rename(tenant / "adapter_model.bin")
    request = Request(str(tenant))
    assert ensure(manager, request) is None
    assert manager.pins.all()[1].reason
    put("inverted", tenant)
    assert ensure(manager, request) == IDENTITY["inverted"]


def test_one_number_for_two_adapters_is_the_one_that_is_loaded(manager: Manager, tenant: Path) -> None:
    """vLLM asks for unique numbers and does not check: it computes with what it loaded under the number."""
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    other = Request(str(BUNDLED / "inverted"), lora_name="other")
    assert ensure(manager, other) == IDENTITY["standard"] == manager.step(other)


def test_copies_are_kept_only_while_they_can_be_needed(manager: Manager, tmp_path: Path) -> None:
    kept = []
    for number in range(1, 6):
        folder = tmp_path / f"tenant-{number}"
        put("standard", folder)
        manager.pins.ensure(Request(str(folder), number), frozenset({1}))
        kept = sorted(manager.pins.all())
    # The last one, the one under way; nothing is loaded.
    assert kept == [1, 5]
    copies = [path for path in (tmp_path / "tmp").glob("kvprov-adapters-*/*") if path.is_dir()]
    assert len(copies) == 2


def test_copies_of_processes_that_ended_are_removed_and_those_of_live_ones_are_not(
    manager: Manager, tenant: Path, tmp_path: Path
) -> None:
    abandoned, live, young = (tmp_path / "tmp" / f"kvprov-adapters-{name}" for name in ("abandoned", "live", "young"))
    for folder in (abandoned, live, young):
        folder.mkdir()
    for folder in (abandoned, live):
        os.utime(folder, (0, 0))
    descriptor = os.open(live, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "tmp" / "kvprov-adapters-link").symlink_to(elsewhere)
    ensure(manager, Request(str(tenant)))
    assert not abandoned.exists()
    assert live.exists()
    assert young.exists()
    assert elsewhere.exists()
    os.close(descriptor)


@pytest.mark.parametrize("changed", [False, True])
def test_a_young_original_is_looked_at_again_once(
    manager: Manager, tenant: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """Its stamps say nothing at first; they must not say so for as long as the adapter is loaded."""
    request = Request(str(tenant))
    ensure(manager, request)
    manager.step(request)
    first = manager.pins.all()[1]
    assert not first.still_at_path(request)
    if changed:
        put("inverted", tenant)
    copies = []
    copy = manager.pins.copy
    monkeypatch.setattr(manager.pins, "copy", lambda asked: copies.append(copy(asked)) or copies[-1])
    assert ensure(manager, request) == IDENTITY["standard"]
    assert copies == []
    time.sleep(max(0.0, first.look_again_at - time.monotonic()))
    for _ in range(3):
        assert ensure(manager, request) == IDENTITY["standard"] == manager.step(request)
    assert len(copies) == 1
    # Only what is still there can be recognized without asking.
    assert manager.pins.all()[1].still_at_path(request) is (not changed)


def test_loading_in_place_what_is_not_loaded_keeps_what_was_loaded(
    manager: Manager, tenant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant exchanges its files right after they were loaded: the identity is that of the loaded ones."""
    request = Request(str(tenant))
    ensure(manager, request)
    load = manager.add_adapter

    def load_and_exchange(asked: Request) -> None:
        load(asked)
        put("inverted", tenant)

    monkeypatch.setattr(manager, "add_adapter", load_and_exchange)
    assert ensure(manager, replace(request, load_inplace=True)) == IDENTITY["standard"] == manager.loaded[1]


def test_no_room_for_copies_leaves_the_adapter_unknown(
    manager: Manager, tenant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(str(tenant))

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", full)
        assert ensure(manager, request) is None
        assert "No space left" in manager.pins.all()[1].reason
    assert ensure(manager, request) == IDENTITY["standard"]


def test_two_processes_may_clean_up_at_once(
    manager: Manager, tenant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "tmp" / "kvprov-adapters-gone"
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone]))
    assert ensure(manager, Request(str(tenant))) == IDENTITY["standard"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, ""])
def test_a_path_that_is_none_leaves_the_adapter_unknown(manager: Manager, name: str) -> None:
    assert ensure(manager, Request(name)) is None


def test_the_modules_that_are_applied_belong_to_the_identity(manager: Manager, tenant: Path) -> None:
    request = Request(str(tenant))
    seen = set()
    for targets in (None, ["q_proj"], ["v_proj"], ["v_proj", "q_proj"], ["q_proj", "v_proj", "q_proj"]):
        manager.lora_config = SimpleNamespace(target_modules=targets)
        adapter = manager.pins.copy(request)
        seen.add(adapter.identity)
    assert len(seen) == 4
    assert IDENTITY["standard"] in seen


def test_workers_that_hold_different_bytes_know_nothing() -> None:
    from kvprov.engines.vllm.adapters import EngineAdapters

    one, other = (PinnedAdapter("a", "/a", SimpleNamespace(identity=f"adapter:{n}")) for n in "xy")  # type: ignore[arg-type]
    executor = SimpleNamespace(collective_rpc=lambda *_, **__: [{1: one, 2: one}, {1: one, 2: other}])
    adapters = EngineAdapters(executor)
    adapters.resync()
    assert adapters.value(1).identity == "adapter:x"  # type: ignore[union-attr]
    assert "different" in adapters.value(2).reason  # type: ignore[union-attr]
    assert "no worker" in adapters.value(3).reason  # type: ignore[union-attr]
