"""OffloadingConnector over files, an object store and other engines."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import exchanges
from tests.support.engine import Adapter, Answer, Engine, Launch
from tests.support.exchanges import Exchanged
from tests.support.host_offload import offloading
from tests.support.models import BLOCK, BUNDLED, Models
from tests.support.ports import free_port
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.provenance import Provenance
from tests.support.s3 import s3_server
from tests.support.steps import bypassed, call, generate, loaded, same, tokens
from tests.support.tiers.offloading import NIXL, file_tier, files

pytestmark = pytest.mark.engine

SETTLE = 1.0
GENERATED = 4
ENTRY = 64 << 10
"""Bytes of one block: 4 layers, keys and values of 2 heads of 64 numbers of two bytes, for 32 tokens."""


def loadable(prompt: list[int]) -> int:
    """Return how many tokens of `prompt` the connector can load: whole blocks below its last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def settle(engine: Engine) -> None:
    """Take the step in which the last stores are begun, and wait for them."""
    engine.generate([[11, 12, 13]], tokens=1)
    time.sleep(SETTLE)


def over(root: Path, model: str, mode: str = "enforce", **more: Any) -> Launch:
    """Return an engine with a tier of files below `root`."""
    return Launch(model, root, mode, connector=offloading(file_tier(root)), **more)


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


def pickle_adapter(folder: Path) -> Adapter:
    """Return an adapter that nothing is known of: its tensors are pickled."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(BUNDLED / "adapters" / "inverted", folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    return Adapter("pickled", 3, str(folder))


@pytest.fixture(scope="module")
def full(prompts: list[list[int]]) -> int:
    return sum(map(loadable, prompts))


@pytest.fixture(scope="module")
def other(models: Models, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with other weights."""
    folder = tmp_path_factory.mktemp("offloading") / "other"
    models.copy_base(folder)
    models.perturb(folder)
    return str(folder)


# Files: who reads whose.


@dataclass
class Fleet:
    """Engines over one folder, which holds what all of them wrote.

    Attributes:
        root: The folder.
        stock: The folder of engines without kvprov.
        adapter: The one that the first of them used.
        runs: By what was different about each.
    """

    root: Path
    stock: Path
    adapter: Adapter
    runs: dict[str, Run]

    def answers(self, name: str) -> list[Answer]:
        answers: list[Answer] = self.runs[name].results[0]
        return answers


def exchange(engine: Engine, *, folder: Path) -> None:
    exchanges.exchange_adapter(engine, "inverted", folder)


@pytest.fixture(scope="module")
def fleet(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    other: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Fleet:
    folder = tmp_path_factory.mktemp("fleet")
    root, stock, tenant = folder / "bound", folder / "stock", folder / "tenant"
    model, moved = models.copy_base(folder / "model"), models.copy_base(folder / "elsewhere" / "moved")
    exchanges.put("standard", tenant)
    adapter = Adapter("tenant", 1, str(tenant))
    elsewhere = models.adapter("standard", 7, "renamed", folder / "another")
    runs: dict[str, Run] = {}

    def ask(adapter: Adapter = adapter) -> Step:
        return partial(generate, prompts=prompts, adapter=adapter, tokens=GENERATED)

    def run(plans: dict[str, tuple[Launch, list[Step]]]) -> None:
        for name, ended in zip(plans, processes.run_all(list(plans.values())), strict=True):
            runs[name] = ran(ended)

    # Each with the files of the others beside its own, and two at a time: they race for the same names.
    run(
        {
            "first": (over(root, model), [ask(), settle]),
            "twin": (over(root, moved), [ask(elsewhere), settle]),
            "stock": (over(stock, model, "off"), [ask(), settle]),
            "isolated": (Launch(model, None, "off"), [ask()]),
        }
    )
    readers = {
        name: (over(root, model, args=Provenance.of(name).args()), [ask(), settle])
        for name in ("precision", "model_config", "kv_representation")
    }
    run(
        {
            "elsewhere": (over(root, moved), [ask(elsewhere), settle]),
            "without kvprov": (over(stock, model, "off", env={"VLLM_PLUGINS": "none"}), [ask(), settle]),
            **readers,
        }
    )
    # The same path and name, other weights; then the old weights, and another adapter's bytes.
    shutil.copytree(other, folder / "model", dirs_exist_ok=True)
    run(
        {
            "weights": (over(root, model), [ask(), settle]),
            "weights, stock": (over(stock, model, "off"), [ask()]),
        }
    )
    shutil.copytree(BUNDLED / "base", folder / "model", dirs_exist_ok=True)
    exchanges.put("inverted", tenant)
    run(
        {
            "adapter": (over(root, model), [ask(), settle]),
            "adapter, stock": (over(stock, model, "off"), [ask()]),
        }
    )
    return Fleet(root, stock, adapter, runs)


def test_the_same_state_is_shared_whatever_model_and_adapter_are_called(fleet: Fleet, full: int) -> None:
    assert loaded(fleet.answers("elsewhere")) == full > 0
    for name in ("first", "twin", "elsewhere"):
        assert same(fleet.answers(name), fleet.answers("isolated")), name


@pytest.mark.parametrize("name", ["weights", "adapter"])
def test_stock_serves_foreign_state(fleet: Fleet, full: int, name: str) -> None:
    stock = fleet.answers(f"{name}, stock")
    assert loaded(fleet.answers("stock")) == 0
    assert loaded(stock) == full
    assert not same(stock, fleet.answers(name))


@pytest.mark.parametrize("name", ["weights", "precision", "model_config", "kv_representation", "adapter"])
def test_other_provenance_reads_nothing(fleet: Fleet, name: str) -> None:
    assert loaded(fleet.answers(name)) == 0


def test_engines_that_race_for_one_name_leave_one_whole_entry(fleet: Fleet, prompts: list[list[int]]) -> None:
    """Two of the same provenance, and others of another one, wrote at the same time."""
    names = files(fleet.root)
    of_one = sum((len(prompt) - 1) // BLOCK for prompt in prompts)
    # Four provenances more than the first left what they computed; one of them in a cache of another type.
    assert len(names) == 6 * of_one
    sizes = {(fleet.root / name).stat().st_size for name in names}
    assert sizes == {ENTRY}
    assert not list(fleet.root.rglob("*.tmp"))


def test_no_name_holds_a_path_and_each_says_the_shape(fleet: Fleet) -> None:
    folders = {name.split("/")[0] for name in files(fleet.root)}
    assert all(folder.startswith("kvprov-tp1-pp1-pcp1-dcp1_") for folder in folders)
    # Two: the type of the cache's elements is in the name as well.
    assert len(folders) == 2


def test_off_is_stock(fleet: Fleet, full: int) -> None:
    """In mode off, an engine reads and writes what one does that has never heard of kvprov."""
    alone = fleet.runs["without kvprov"]
    assert "kvprov:" not in alone.log
    assert loaded(fleet.answers("without kvprov")) == full
    # So it stored under no new name. (Stock goes by path and name, so the others' names are these, too.)
    assert len(files(fleet.stock)) * BLOCK == full


# Requests under way.


@pytest.fixture(scope="module")
def scene(models: Models, tmp_path_factory: pytest.TempPathFactory) -> exchanges.Scene:
    return exchanges.scene(models, tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def exchanged(processes: Processes, scene: exchanges.Scene, tmp_path_factory: pytest.TempPathFactory) -> Exchanged:
    return exchanges.play(processes, scene, over(tmp_path_factory.mktemp("exchanged"), scene.old), SETTLE)


def test_the_exchanges_took_place_beneath_requests(exchanged: Exchanged) -> None:
    assert exchanged.took_place()
    assert exchanged.witness.keeps_what_was_handed_out()


@pytest.mark.parametrize("stage", exchanges.STAGES)
def test_requests_under_way_leave_each_provenance_its_own(exchanged: Exchanged, stage: str) -> None:
    assert exchanged.unexpected(stage) == {}
    assert same(exchanged.read[stage], exchanged.right[stage])


def test_stock_leaves_foreign_state_of_requests_under_way(
    processes: Processes, scene: exchanges.Scene, exchanged: Exchanged, tmp_path: Path
) -> None:
    """The control: without kvprov the same exchanges leave state that answers wrongly."""
    launch = over(tmp_path, scene.old, "off")
    processes.run(replace(launch, args=exchanges.ARGS), partial(exchanges.write, scene=scene, settle=SETTLE))
    ask = partial(exchanges.read, scene=scene, prompts=list(exchanged.prompts.values()))
    read = processes.run(launch, ask).results[0]
    for stage in exchanges.STAGES[1:]:
        assert sum(answer.loaded for answer in read[stage]) > sum(exchanged.loaded(stage).values())
        assert not same(read[stage], exchanged.right[stage])


# What each site is given, and what becomes of a store that fails.


class Spy:
    """Notes the keys that each part of the connector is given, in the engine's process."""

    def __init__(self) -> None:
        self.keys: dict[str, list[str]] = {}

    def note(self, site: str, keys: Any) -> None:
        self.keys.setdefault(site, []).extend(bytes(key)[:-4].hex() for key in keys)

    def __call__(self) -> None:
        from vllm.distributed.kv_events import BlockStored
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
        from vllm.v1.kv_offload.tiering.fs import manager
        from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

        def watch(owner: Any, name: str, site: str, keys: Any) -> None:
            native = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                result = native(*args, **kwargs)
                self.note(site, keys(args, result))
                return result

            setattr(owner, name, watched)

        def named(paths: list[str]) -> list[bytes]:
            return [bytes.fromhex(Path(path).stem) + b"\0\0\0\0" for path in paths]

        tiering, lookup = TieringOffloadingManager, manager.FsAsyncLookupManager
        watch(tiering, "lookup", "lookup", lambda args, _: [args[1]])
        watch(tiering, "prepare_load", "load", lambda args, _: args[1])
        watch(tiering, "prepare_store", "store", lambda _, output: output.keys_to_store if output else [])
        watch(tiering, "prepare_store", "evict", lambda _, output: output.evicted_keys if output else [])
        watch(lookup, "batch_lookup", "tier lookup", lambda args, _: args[1])
        watch(manager, "batch_load_block", "tier load", lambda args, _: named(args[0]))
        watch(manager, "batch_store_block", "tier store", lambda args, _: named(args[0]))
        native = OffloadingConnector.take_events

        def take_events(connector: Any) -> list[Any]:
            events = list(native(connector))
            stored = [event for event in events if isinstance(event, BlockStored)]
            self.note("event", [bytes(h) + b"\0\0\0\0" for event in stored for h in event.block_hashes])
            return events

        OffloadingConnector.take_events = take_events

    def tell(self) -> dict[str, list[str]]:
        return self.keys


def events() -> dict[str, Any]:
    from vllm.config import KVEventsConfig

    return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}


def test_every_site_goes_by_the_names_in_the_store(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path
) -> None:
    """Lookup, load, store, prefetch from the tier below, eviction and events, in two processes."""
    # Room for the blocks of two of the prompts, so that there are evictions.
    connector = offloading(file_tier(tmp_path) | {"enable_kv_events": True}, cpu_bytes_to_use=10 * ENTRY)
    ask = partial(generate, prompts=prompts, tokens=1, one_by_one=True)
    seen = []
    for _ in range(2):
        spy = Spy()
        # Else an event's hash is cut to the width of an integer.
        env = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
        launch = Launch(models.base, tmp_path, env=env, connector=connector, before=spy, args=events())
        run = processes.run(launch, ask, settle, partial(call, function=spy.tell))
        seen.append(run.results[2])
        assert loaded(run.results[0]) == (full if len(seen) == 2 else 0)
    wrote, read = seen
    names = {Path(name).stem for name in files(tmp_path)}
    assert len(names) * BLOCK == full
    for site in ("lookup", "store", "tier lookup", "tier store", "event"):
        assert set(wrote[site]) <= names, site
    assert set(wrote["store"]) == set(wrote["tier store"]) == set(wrote["event"]) == names
    assert set(wrote["evict"]) < names
    assert wrote["evict"]
    for site in ("lookup", "load", "tier lookup", "tier load"):
        assert set(read[site]) == names, site
    assert not read.get("tier store")


def limit(_engine: Engine, *, size: int) -> None:
    """Let no file of this process grow beyond `size`: what a full disk looks like."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_damaged_entries_full_disks_and_unknown_provenance(
    processes: Processes, models: Models, prompts: list[list[int]], fleet: Fleet, tmp_path: Path
) -> None:
    """Answers are right whatever becomes of the store, and a request of unknown provenance leaves nothing there."""
    root = tmp_path / "root"
    shutil.copytree(fleet.root, root)
    names = files(root)
    for number, name in enumerate(names):
        size = (root / name).stat().st_size
        # Cut short, emptied, or as it was.
        os.truncate(root / name, (size // 2, 0, size)[number % 3])
    adapter, pickled = models.adapter("standard"), pickle_adapter(tmp_path / "pickled")
    ask = partial(generate, prompts=prompts, adapter=adapter, tokens=GENERATED)
    unknown = partial(generate, prompts=prompts, adapter=pickled, tokens=GENERATED)
    full_disk = partial(generate, prompts=[prompt[1:] for prompt in prompts], adapter=adapter, tokens=GENERATED)
    launch = over(root, models.base, args={"enable_prefix_caching": False})
    run = processes.run(
        launch,
        ask,
        settle,
        partial(call, function=partial(files, root)),
        unknown,
        unknown,
        settle,
        partial(call, function=partial(files, root)),
        partial(bypassed, reason="adapter"),
        partial(limit, size=ENTRY - 1),
        full_disk,
        settle,
        full_disk,
        partial(call, function=partial(files, root)),
    )
    damaged, _, before, first, second, _, after, bypasses, _, on_full_disk, _, again, at_last = run.results
    assert same(damaged, fleet.answers("isolated"))
    assert loaded(damaged) < sum(map(loadable, prompts))
    # Unknown provenance.
    assert loaded(first) == loaded(second) == 0
    assert tokens(first) == tokens(second) == tokens(fleet.answers("adapter"))
    assert after == before
    # Those, and the requests without an adapter by which this test settles: here these are bypassed, too.
    assert bypasses == 2 * len(prompts) + 2
    # The full disk: the engine goes on with what it holds in memory, and leaves no part of a file.
    assert at_last == after
    assert loaded(on_full_disk) == 0
    assert tokens(again) == tokens(on_full_disk)
    assert not list(root.rglob("*.tmp"))


def test_an_object_store_and_its_death(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, other: str, tmp_path: Path
) -> None:
    ask = partial(generate, prompts=prompts, tokens=GENERATED)
    elsewhere = models.copy_base(tmp_path / "elsewhere")
    with s3_server(tmp_path) as server:
        connector = offloading({"type": "obj", "store_config": server.store_config()})

        def launch(model: str) -> Launch:
            return Launch(model, tmp_path, env=NIXL, connector=connector)

        seeded = processes.run(launch(models.base), ask, settle).results[0]
        names = server.keys()
        dying = [
            ask,
            partial(call, function=server.kill_from_elsewhere()),
            partial(generate, prompts=[prompts[0][1:]], tokens=GENERATED),
            ask,
        ]
        foreign = processes.run(launch(other), ask, settle).results[0]
        read, _, without, again = processes.run(launch(elsewhere), *dying).results
    assert (loaded(seeded), loaded(read), loaded(foreign)) == (0, full, 0)
    assert same(read, seeded)
    assert len(names) * BLOCK == full
    assert all(name.lstrip("/").startswith("kvprov-tp1-") for name in names)
    assert loaded(without) == 0
    assert same(again, seeded)


# Two engines that are up at once.


UCX = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}


def serve_until(engine: Engine, *, ready: Path, stop: Path) -> None:
    """Keep the engine stepping, which is what drives its peers' reads."""
    ready.touch()
    while not stop.exists():
        engine.generate([[11, 12, 13]], tokens=1)
        time.sleep(0.02)


def pull(
    engine: Engine, *, prompts: list[list[int]], port: int, request: str, adapter: Adapter, host: str = "127.0.0.1"
) -> list[Answer]:
    """Ask with the source that a client may name: one prompt a request, as each is a transfer of its own."""
    answers = []
    for number, prompt in enumerate(prompts):
        source = {"remote_host": host, "remote_port": port, "kv_request_id": f"{request}-{number}"}
        extra = {"kv_transfer_params": {"remote_kv_source": source}}
        answers += engine.generate([prompt], tokens=GENERATED, adapter=adapter, extra_args=extra)
    return answers


def test_an_engine_reads_from_its_peer_what_it_would_have_computed(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, other: str, tmp_path: Path
) -> None:
    """The same provenance at another path: all. Another adapter, then other weights: nothing.

    Nor anything from a peer that the operator did not list, whatever it has.
    """
    ports = [free_port(), free_port()]
    moved = models.copy_base(tmp_path / "moved")
    standard, inverted = models.adapter("standard"), models.adapter("inverted", 2)
    renamed = models.adapter("standard", 7, "renamed", tmp_path / "renamed")
    ready, stop = tmp_path / "ready", tmp_path / "stop"

    listed = {"KVPROV_PEERS": f"127.0.0.1:{ports[0]}"}
    others = models.prompts(len(prompts) + 2)[len(prompts) :]

    def launch(model: str, port: int) -> Launch:
        tier = {"type": "p2p", "host": "127.0.0.1", "port": port}
        return Launch(model, tmp_path, env={**NIXL, **UCX, **listed}, connector=offloading(tier))

    ask = partial(generate, prompts=prompts, tokens=GENERATED)
    take = partial(pull, prompts=prompts, port=ports[0])
    with ThreadPoolExecutor(1) as pool:
        source = pool.submit(
            processes.run,
            launch(models.base, ports[0]),
            partial(ask, adapter=standard),
            partial(generate, prompts=others, tokens=GENERATED, adapter=standard),
            partial(serve_until, ready=ready, stop=stop),
        )
        try:
            while not ready.exists() and not source.done():
                time.sleep(0.1)
            peer = processes.run(
                launch(moved, ports[1]),
                partial(take, request="same", adapter=renamed),
                partial(take, prompts=others[:1], request="stranger", adapter=renamed, host="localhost"),
                partial(take, prompts=others[1:], request="friend", adapter=renamed),
                partial(take, request="adapter", adapter=inverted),
                partial(exchanges.exchange_weights, path=other),
                partial(take, request="weights", adapter=renamed),
            )
        finally:
            stop.touch()
        seeded = source.result().results[0]
    same_state, stranger, friend, adapter, _, weights = peer.results
    assert loaded(stranger) == 0
    assert loaded(friend) > 0
    assert f"names the peer localhost:{ports[0]}, which KVPROV_PEERS does not list" in peer.log
    assert loaded(seeded) == 0
    assert loaded(same_state) == full
    assert same(same_state, seeded)
    assert loaded(adapter) == loaded(weights) == 0
    assert not same(adapter, seeded)
    assert not same(weights, seeded)
