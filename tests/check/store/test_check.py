"""What is concluded from stores that workers wrote: by workers made up here, each fault one at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from kvprov.check.store import StoreCheck, Worker, check_stores
from kvprov.check.store.check import COMPLETE, UNBOUND, Outcome
from kvprov.check.store.served import DOCUMENT_TOKENS, DOCUMENTS, Model, documents
from kvprov.check.store.sglang import SglangFleet, with_queries
from kvprov.check.store.sglang_worker import arguments
from kvprov.check.store.vllm import VllmFleet, example
from kvprov.engines.vllm.connectors import EXPLICIT_MODULE
from kvprov.errors import BindingError, StoreError, UnreadableContentError
from tests.check.store.stores import example as put_example
from tests.cli.support import MODEL

VALUES = np.arange(16, dtype="<f4")
DIMENSIONS = ("adapter", "precision", "sharing_domain")
COMPUTATIONAL = {"adapter", "precision"}


class Fleet:
    """Workers that write one entry. Their keys and state are what two functions say of a worker."""

    title = "made up"
    dimensions: Sequence[str] = DIMENSIONS

    def __init__(self, bound: Callable[[Worker], object], state: Callable[[Worker], float] | None = None) -> None:
        self._bound = bound
        self._state = state or (lambda worker: float(worker.differs in COMPUTATIONAL))

    def write(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            number = 1 if worker.binding == UNBOUND else crc32(repr(self._bound(worker)).encode())
            put_example(worker.store, number, VALUES + self._state(worker))


def sound_key(worker: Worker) -> object:
    return None if worker.differs == worker.binding else worker.differs


def outcomes(found: StoreCheck) -> dict[tuple[str, str], Outcome]:
    return {(row.binding, row.dimension): row.outcome for row in found.rows}


def test_a_sound_binding(tmp_path: Path) -> None:
    found = check_stores(Fleet(sound_key), tmp_path / "s")
    assert found.sound, found.words
    assert "reopens that one alone (adapter, precision, sharing_domain)" in found.words
    seen = outcomes(found)
    assert len(seen) == 15
    assert seen[UNBOUND, "adapter"] == Outcome.COLLIDES
    assert seen[UNBOUND, "sharing_domain"] == Outcome.SHARED
    assert all(seen[COMPLETE, name] == Outcome.SEPARATED for name in DIMENSIONS)
    assert seen["adapter", "adapter"] == seen["precision", "precision"] == Outcome.COLLIDES
    assert seen["sharing_domain", "sharing_domain"] == Outcome.SHARED
    assert found.to_json()["rows"][0]["largest_difference"] == 1.0


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        # Leaves the adapter out of the complete binding.
        (lambda w: None if w.differs == "adapter" else sound_key(w), ["adapter (complete)", "adapter (precision)"]),
        # Withholding reopens nothing, so that what the binding does is not what separates.
        (lambda w: w.differs, ["adapter (adapter)", "precision (precision)", "sharing_domain (sharing_domain)"]),
        # Withholding reopens everything.
        (lambda w: None if w.binding != COMPLETE else w.differs, ["precision (adapter)", "adapter (precision)"]),
        # The tenant is left out: same bytes, and yet it must not be.
        (lambda w: None if w.differs == "sharing_domain" else sound_key(w), ["sharing_domain (complete)"]),
    ],
)
def test_a_binding_that_is_not_sound_is_named(tmp_path: Path, key: Callable[[Worker], Any], wrong: list[str]) -> None:
    found = check_stores(Fleet(key), tmp_path / "s")
    assert found.judged
    assert not found.sound
    for name in wrong:
        assert name in found.words


def test_without_a_repeatable_worker_nothing_is_told(tmp_path: Path) -> None:
    noisy = Fleet(sound_key, lambda w: float(w.differs in COMPUTATIONAL) + 0.01 * (w.store.name == "again"))
    found = check_stores(noisy, tmp_path / "a")
    assert not found.judged
    assert not found.sound
    assert "--tolerance" in found.words
    assert check_stores(noisy, tmp_path / "b", tolerance=0.1).sound
    # A tolerance that covers what the dimension does hides it, which shows.
    assert not check_stores(noisy, tmp_path / "c", tolerance=2.0).sound


def test_workers_that_write_nothing_prove_nothing(tmp_path: Path) -> None:
    class Idle(Fleet):
        def write(self, workers: Sequence[Worker]) -> None:
            del workers

    found = check_stores(Idle(sound_key), tmp_path / "s", dimensions=["adapter"])
    assert not found.judged
    assert set(outcomes(found).values()) == {Outcome.UNDECIDED}


def test_one_dimension_and_one_that_cannot_be_varied(tmp_path: Path) -> None:
    found = check_stores(Fleet(sound_key), tmp_path / "s", dimensions=["adapter", "adapter"])
    assert len(found.rows) == 3
    with pytest.raises(StoreError, match="cannot be made to differ in 'weights'"):
        check_stores(Fleet(sound_key), tmp_path / "t", dimensions=["weights"])


def test_settings_make_the_binding() -> None:
    def settings(binding: str) -> dict[str, str]:
        return Worker(binding, None, Path("s")).settings()

    assert settings(UNBOUND) == {"KVPROV_MODE": "off"}
    assert settings(COMPLETE) == {"KVPROV_MODE": "enforce"}
    assert settings("adapter") == {"KVPROV_MODE": "enforce", "KVPROV_UNSAFE_WITHHOLD": "adapter"}


# Workers of vLLM's, without vLLM.


def test_bound_workers_name_the_bound_connector_and_unbound_ones_do_not(tmp_path: Path) -> None:
    """Else a worker in which the plugin is not found would run unbound, and its store be taken for a bound one's."""
    seen: dict[str, dict[str, Any]] = {}

    def run(worker: Worker, request: dict[str, Any], _settings: object) -> None:
        seen[worker.binding] = request["connector"]

    fleet = VllmFleet(Model(MODEL / "base"), example, "vLLM", tmp_path, run)
    fleet.write([Worker(binding, None, tmp_path / binding) for binding in (UNBOUND, COMPLETE, "precision")])
    assert "kv_connector_module_path" not in seen[UNBOUND]
    assert seen[COMPLETE]["kv_connector_module_path"] == EXPLICIT_MODULE
    assert seen["precision"]["kv_connector_module_path"] == EXPLICIT_MODULE


def test_documents_are_the_model_s_own_tokens_and_the_same_at_each_call(tmp_path: Path) -> None:
    found = documents(MODEL / "base")
    assert found == documents(MODEL / "base")
    assert [len(document) for document in found] == [DOCUMENT_TOKENS] * DOCUMENTS
    assert found[0] != found[1]
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "no"):
        with pytest.raises(UnreadableContentError):
            documents(folder)


def test_workers_differ_in_what_they_are_told_and_the_adapter_in_its_bytes(tmp_path: Path) -> None:
    seen: dict[str | None, tuple[dict[str, Any], bytes]] = {}

    def run(worker: Worker, request: dict[str, Any], _settings: object) -> None:
        seen[worker.differs] = request, (Path(request["adapter"]["folder"]) / "adapter_model.safetensors").read_bytes()

    adapters = MODEL / "adapters" / "standard", MODEL / "adapters" / "inverted"
    fleet = VllmFleet(Model(MODEL / "base", adapters), example, "vLLM", tmp_path, run)
    fleet.write([Worker(UNBOUND, name, tmp_path / "s") for name in ("adapter", None, *fleet.dimensions[1:])])
    first, first_bytes = seen.pop(None)
    assert seen.keys() == set(fleet.dimensions)
    for name, (request, adapter) in seen.items():
        changed = {key for key in request if request[key] != first[key]}
        told = {"adapter": set(), "sharing_domain": {"salt"}}.get(name, {"arguments"})
        assert changed == told
        assert (adapter != first_bytes) == (name == "adapter")


def test_a_worker_that_fails_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = VllmFleet(Model(MODEL / "base"), lambda _store: {"kv_connector": "NoSuch"}, "vLLM", tmp_path)
    assert "adapter" not in fleet.dimensions
    # A module named vllm that cannot be used: this fails as fast as it gets.
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no engine here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BindingError, match="ended with code") as caught:
        fleet.write([Worker(COMPLETE, None, tmp_path / "x")])
    assert (tmp_path / "complete-x.json").exists()
    assert "no engine here" in caught.value.message
    assert "complete-x.log" in caught.value.advice


# Workers of SGLang's, without SGLang.


def test_workers_of_sglang_differ_in_what_they_are_told_or_in_bytes_at_one_path(tmp_path: Path) -> None:
    seen: dict[str | None, tuple[dict[str, Any], bytes, bytes]] = {}

    def run(worker: Worker, request: dict[str, Any], _settings: object) -> None:
        adapter = Path(request["adapter"]["folder"]) / "adapter_model.safetensors"
        weights = Path(request["model"]) / "model.safetensors"
        seen[worker.differs] = request, adapter.read_bytes(), weights.read_bytes()

    adapters = MODEL / "adapters" / "standard", MODEL / "adapters" / "inverted"
    second = tmp_path / "second"
    shutil.copytree(MODEL / "base", second)
    (second / "model.safetensors").write_bytes(b"other weights")
    (tmp_path / "work").mkdir()
    fleet = SglangFleet(Model(MODEL / "base", adapters, second, {"device": "cpu"}), tmp_path / "work", run)
    assert "adapter" not in SglangFleet(Model(MODEL / "base"), tmp_path, run).dimensions
    fleet.write([Worker(UNBOUND, name, tmp_path / "s") for name in ("weights", "adapter", None, *fleet.dimensions[2:])])
    first, *first_bytes = seen.pop(None)
    assert seen.keys() == set(fleet.dimensions)
    assert first["arguments"] == {"device": "cpu"}
    for name, (request, *content) in seen.items():
        changed = {key for key in request if request[key] != first[key]}
        told = {"adapter": set(), "weights": set(), "sharing_domain": {"salt"}}.get(name, {"arguments"})
        assert changed == told
        assert request["arguments"].items() >= first["arguments"].items()
        assert [one != other for one, other in zip(content, first_bytes, strict=True)] == [
            name == "adapter",
            name == "weights",
        ]


def test_bound_workers_of_sglang_are_guarded(tmp_path: Path) -> None:
    """That the guard refuses an engine in which nothing is bound is shown in tests/engines/sglang."""
    seen: dict[str, bool] = {}

    def run(worker: Worker, request: dict[str, Any], _settings: object) -> None:
        seen[worker.binding] = request["bound"]

    fleet = SglangFleet(Model(MODEL / "base"), tmp_path, run)
    fleet.write([Worker(binding, None, tmp_path / binding) for binding in (UNBOUND, COMPLETE, "weights")])
    assert seen == {UNBOUND: False, COMPLETE: True, "weights": True}


def test_what_the_engine_is_told_does_not_move_the_store() -> None:
    told = {"page_size": 64, "hicache_storage_backend": "mooncake", "enable_hierarchical_cache": False}
    request = {"model": "m", "store": "s", "bound": False, "adapter": None, "arguments": told}
    found = arguments(request)
    assert found["page_size"] == 64
    assert found["hicache_storage_backend"] == "file"
    assert found["enable_hierarchical_cache"] is True
    assert "lora_paths" not in found


def test_an_adapter_without_queries_gets_some_that_change_nothing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    source = MODEL / "adapters" / "standard"
    before = load_file(source / "adapter_model.safetensors")
    after = load_file(with_queries(source, tmp_path / "a") / "adapter_model.safetensors")
    assert not any("q_proj" in name for name in before)
    added = after.keys() - before.keys()
    assert added == {name.replace("v_proj", "q_proj") for name in before}
    assert not any(after[name].any() for name in added)
    assert all(torch.equal(after[name], before[name]) for name in before)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
