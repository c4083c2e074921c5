"""HF3FSKVConnector and MultiConnector: what they load, store, and leave alone, in real engines."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprov.errors import BindingError
from tests.support import tamper
from tests.support.engine import Answer, Engine, Launch
from tests.support.hf3fs import MetadataServer
from tests.support.host_offload import offloading
from tests.support.models import BLOCK, Models
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.servers import serve
from tests.support.steps import bypassed, call, generate, loaded, tokens
from tests.support.tiers import Tier
from tests.support.tiers.example import example, folders
from tests.support.tiers.hf3fs import files as hf3fs_files
from tests.support.tiers.multi import multi, over_two
from tests.support.tiers.offloading import file_tier, files

pytestmark = pytest.mark.engine

MULTIPROCESSING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
EXPLICIT = {"kv_connector_module_path": "kvprov.engines.vllm.connector"}
GENERATED = 32
NO_TEXT: Any = 5
"""A salt that is no text, so that nobody knows whose request it is."""


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


def whole_blocks(prompts: list[list[int]]) -> int:
    """Return how many tokens of `prompts` can be loaded where every whole block before the last token is looked for."""
    return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def stored_blocks(prompts: list[list[int]]) -> int:
    """Return how many blocks a connector stores that also stores what was generated, all but the last token of it."""
    return sum((len(prompt) + GENERATED - 1) // BLOCK for prompt in prompts)


# HF3FSKVConnector.


@dataclass
class Spied:
    """The keys that an engine's connector handed to its metadata server, in the order of first use."""

    looked_up: list[str]
    stored: list[str]
    loaded: list[str]


def spy(engine: Engine) -> None:
    """Note from now on which keys either half of the connector asks for, in `engine.spied`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spied = Spied([], [], [])
    scheduler, worker = engine.core.scheduler.connector._metadata_client, get_kv_transfer_group()._metadata_client

    def noting(client: Any, method: str, into: list[str], keys_of: Any) -> None:
        native = getattr(client, method)

        def call(*args: Any) -> Any:
            into.extend(key for key in keys_of(*args) if key not in into)
            return native(*args)

        setattr(client, method, call)

    noting(scheduler, "batch_key_exists", spied.looked_up, lambda keys: keys)
    noting(worker, "allocate_pages_for_keys", spied.stored, lambda _rank, pairs: [key for key, _ in pairs])
    noting(worker, "get_key_locations", spied.loaded, lambda _rank, keys: keys)
    engine.spied = spied  # type: ignore[attr-defined]


def what_was_spied(engine: Engine) -> Spied:
    found: Spied = engine.spied  # type: ignore[attr-defined]
    return found


def wait_for(url: str, entries: int) -> Step:
    return partial(call, function=partial(MetadataServer(url).wait_for, entries))


def url_of(tier: Tier) -> str:
    """The address of a tier's metadata server, which is what its shim was told."""
    assert isinstance(tier.before, partial)
    return str(tier.before.args[0])


@dataclass
class HF3FS:
    """What four engines did with two stores, one stock's and one bound."""

    tiers: dict[str, Tier]
    folder: Path
    seeded: dict[str, Run]
    read: dict[str, Run]
    keys: dict[str, list[str]]


@contextmanager
def _stock_and_bound(folder: Path) -> Iterator[dict[str, Tier]]:
    """A tier for engines of either mode."""
    with ExitStack() as stack:
        tiers = {}
        for mode in ("off", "enforce"):
            (folder / mode).mkdir(exist_ok=True)
            tiers[mode] = stack.enter_context(hf3fs_files(folder / mode))
        yield tiers


def _launch(models: Models, tier: Tier, mode: str = "enforce", **more: Any) -> Launch:
    connector = {**tier.connector, **more.pop("connector", {})}
    # The store's folder is in the connector's own configuration.
    return Launch(models.base, Path(), mode, connector=connector, before=tier.before, env=tier.env, **more)


@pytest.fixture(scope="module")
def hf3fs(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HF3FS]:
    folder = tmp_path_factory.mktemp("hf3fs")
    with _stock_and_bound(folder) as tiers:
        off, enforce = tiers.values()
        ask, blocks = partial(generate, prompts=prompts), stored_blocks(prompts)
        waits = {mode: wait_for(url_of(tier), blocks) for mode, tier in tiers.items()}
        seeds: dict[str, list[Step]] = {
            "off": [ask, waits["off"], ask],
            "enforce": [
                *(spy, ask, waits["enforce"], ask, what_was_spied),
                *(partial(ask, salt=NO_TEXT), partial(ask, salt=NO_TEXT), partial(call, function=_pause)),
                *(waits["enforce"], partial(bypassed, reason="sharing_domain")),
            ],
        }
        ended = processes.run_all([(_launch(models, tiers[mode], mode), steps) for mode, steps in seeds.items()])
        seeded = {mode: ran(run) for mode, run in zip(seeds, ended, strict=True)}
        assert enforce.keys is not None
        assert off.keys is not None
        keys = {"off": off.keys(), "enforce": enforce.keys()}
        # On this CPU, requests without an adapter bypass the tier once one was in use: so adapters come last.
        salted, adapted = partial(ask, salt="tenant"), partial(ask, adapter=models.adapter("inverted"))
        two, three = (wait_for(url_of(enforce), n * blocks) for n in (2, 3))
        reads: dict[str, list[Step]] = {
            "off": [ask, adapted],
            "enforce": [salted, two, salted, ask, adapted, three, adapted],
        }
        ended = processes.run_all([(_launch(models, tiers[mode], mode), steps) for mode, steps in reads.items()])
        yield HF3FS(tiers, folder, seeded, {mode: ran(run) for mode, run in zip(reads, ended, strict=True)}, keys)


def _pause() -> None:
    time.sleep(0.5)


def test_hf3fs_of_stock_reads_what_another_adapter_wrote(hf3fs: HF3FS, prompts: list[list[int]]) -> None:
    """What binding is about."""
    first, _, again = hf3fs.seeded["off"].results
    own, foreign = hf3fs.read["off"].results
    assert [loaded(answers) for answers in (first, again, own, foreign)] == [0, *[whole_blocks(prompts)] * 3]
    assert tokens(own) == tokens(again) == tokens(first)
    # The same request without the store.
    isolated = hf3fs.read["enforce"].results[4]
    assert tokens(foreign) != tokens(isolated)


def test_hf3fs_bound_reads_its_own_and_nothing_else(hf3fs: HF3FS, prompts: list[list[int]]) -> None:
    full = whole_blocks(prompts)
    assert full == 512
    first, again = (hf3fs.seeded["enforce"].results[i] for i in (1, 3))
    assert [loaded(answers) for answers in (first, again)] == [0, full]
    salted, _, salted_again, own, adapted, _, adapted_again = hf3fs.read["enforce"].results
    counts = [loaded(answers) for answers in (salted, salted_again, own, adapted, adapted_again)]
    assert counts == [0, full, full, 0, full]
    assert tokens(salted) == tokens(salted_again) == tokens(own) == tokens(first) == tokens(again)
    assert tokens(adapted) == tokens(adapted_again) != tokens(first)


def test_hf3fs_uses_the_same_keys_at_each_site(hf3fs: HF3FS, prompts: list[list[int]]) -> None:
    spied: Spied = hf3fs.seeded["enforce"].results[4]
    assert spied.looked_up == spied.loaded
    assert len(spied.looked_up) == len(set(spied.looked_up)) <= whole_blocks(prompts) // BLOCK
    assert set(spied.looked_up) < set(spied.stored)
    assert sorted(spied.stored) == hf3fs.keys["enforce"]
    assert all(len(bytes.fromhex(key)) == 32 for key in spied.stored)


def test_hf3fs_leaves_alone_what_nobody_knows(hf3fs: HF3FS, prompts: list[list[int]]) -> None:
    *_, first, second, _, entries, count = hf3fs.seeded["enforce"].results
    assert [loaded(answers) for answers in (first, second)] == [0, 0]
    assert tokens(first) == tokens(hf3fs.seeded["enforce"].results[1])
    # Those of the requests that are known, and not one more.
    assert len(entries) == len(hf3fs.keys["enforce"]) == stored_blocks(prompts)
    assert count == 2 * len(prompts)


def test_hf3fs_off_has_the_keys_of_stock(hf3fs: HF3FS, prompts: list[list[int]]) -> None:
    expected = set()
    for prompt, answer in zip(prompts, hf3fs.seeded["off"].results[0], strict=True):
        known, key = [*prompt, *answer.tokens[:-1]], ""
        for start in range(0, len(known) - BLOCK + 1, BLOCK):
            key = hashlib.md5(f"{key}_{known[start : start + BLOCK]}".encode()).hexdigest()
            expected.add(key)
    assert set(hf3fs.keys["off"]) == expected
    assert not expected & set(hf3fs.keys["enforce"])


def test_hf3fs_computes_what_was_lost(
    hf3fs: HF3FS, processes: Processes, models: Models, prompts: list[list[int]]
) -> None:
    """The metadata server names pages that are not there any more. Comes last: it empties the files."""
    data = list(hf3fs.folder.rglob("hf3fs_vllm_data_file_*"))
    assert len(data) == 2
    for file in data:
        file.write_bytes(b"")
    ask = partial(generate, prompts=prompts)
    recompute = {"kv_load_failure_policy": "recompute"}
    wait = partial(call, function=_pause)
    off, bound = map(
        ran,
        processes.run_all(
            [
                (_launch(models, hf3fs.tiers["off"], "off", connector=recompute), [ask]),
                (_launch(models, hf3fs.tiers["enforce"], connector=recompute), [ask, wait, ask]),
            ]
        ),
    )
    right = tokens(hf3fs.seeded["off"].results[0])
    # Stock computes with whatever the blocks held.
    assert tokens(off.results[0]) != right
    first, _, again = bound.results
    assert tokens(first) == tokens(again) == right
    # What was computed anew was stored anew.
    assert loaded(again) == whole_blocks(prompts)


# Room for two of the four requests when they are fully grown: the others are preempted and resume.
TIGHT = {"num_gpu_blocks_override": 24, "max_num_seqs": 4, "max_num_batched_tokens": 1024}


def count_preemptions(engine: Engine, **request: Any) -> tuple[list[Answer], int]:
    answers = engine.generate(**request)
    return answers, int(sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"))


def test_hf3fs_stores_no_block_under_the_key_of_another(processes: Processes, models: Models, tmp_path: Path) -> None:
    """Requests are preempted, and what was stored before and after is then read as the start of longer prompts."""
    prompts = [models.random_prompt(100, seed=seed) for seed in range(4)]
    ask = partial(count_preemptions, prompts=prompts, tokens=200)
    isolated, _ = processes.run(Launch(models.base, None, "off"), ask).results[0]
    longer = [[*prompt, *answer.tokens[:150]] for prompt, answer in zip(prompts, isolated, strict=True)]
    ask_on = partial(generate, prompts=longer, tokens=50)
    rest = [answer.tokens[150:] for answer in isolated]
    with _stock_and_bound(tmp_path) as tiers:
        steps = [ask, partial(call, function=_pause)]
        for run in processes.run_all([(_launch(models, tiers[m], m, args=TIGHT), steps) for m in tiers]):
            answers, preemptions = ran(run).results[0]
            assert preemptions > 0
            assert tokens(answers) == tokens(isolated)
        off, bound = map(ran, processes.run_all([(_launch(models, tiers[m], m), [ask_on]) for m in tiers]))
    assert loaded(bound.results[0]) >= whole_blocks(prompts)
    assert tokens(bound.results[0]) == rest
    # The control: stock stored some under keys that are not theirs.
    assert tokens(off.results[0]) != rest


def test_hf3fs_keeps_pages_of_two_sizes_apart(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    """An engine with pages twice as large writes first, and reads after another one has written."""
    ask, others = partial(generate, prompts=prompts), partial(generate, prompts=models.prompts(8)[4:])
    large = {"dtype": "float32"}
    pause = partial(call, function=_pause)
    with _stock_and_bound(tmp_path) as tiers:
        ended = []
        for args, steps in ((large, [ask, pause]), ({}, [others, pause]), (large, [ask])):
            launches = [_launch(models, tier, mode, args=args) for mode, tier in tiers.items()]
            ended.append([ran(run).results[0] for run in processes.run_all([(launch, steps) for launch in launches])])
    seeded, _, read = ended
    assert [loaded(answers) for answers in read] == [whole_blocks(prompts)] * 2
    assert tokens(read[1]) == tokens(seeded[1]) == tokens(seeded[0])
    # The control: in stock, the small pages lie across the large ones.
    assert tokens(read[0]) != tokens(seeded[0])


def negate(worker: Any) -> None:
    """What a trainer may do to a worker: here, to turn every weight around."""
    for parameter in worker.get_model().parameters():
        parameter.data.neg_()


def exchange_midway(
    engine: Engine, *, prompt: list[int], tokens: int = 100, exchange: bool = True, name: str = "r"
) -> list[tuple[str, str]]:
    """Let a request run while the weights are exchanged, and return which connectors were told of which request."""
    from vllm import SamplingParams

    from kvprov.engines.vllm.multi import leaves

    told: list[tuple[str, str]] = []
    for leaf in leaves(engine.core.scheduler.connector):
        native = leaf.kvprov_rebound

        def noting(request: Any, native: Any = native, connector: str = type(leaf).__name__) -> None:
            told.append((connector, request.request_id.partition("-")[0]))
            native(request)

        leaf.kvprov_rebound = noting
    parameters = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    requests = engine.llm.llm_engine
    requests.add_request(name, {"prompt_token_ids": prompt}, parameters)
    for _ in range(3):
        requests.step()
    if exchange:
        engine.llm.collective_rpc(negate)
    while requests.has_unfinished_requests():
        requests.step()
    time.sleep(0.5)
    return told


def end_while_loading(engine: Engine, *, prompt: list[int]) -> tuple[int, int]:
    """End a request while it loads; return how many blocks are free just after, and when nothing loads any more."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for client in get_kv_transfer_group()._clients:
        native = client.batch_read

        def slow(*args: Any, native: Any = native) -> Any:
            time.sleep(0.5)
            return native(*args)

        client.batch_read = slow
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    requests = engine.llm.llm_engine
    requests.add_request("ends", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
    requests.step()
    requests.abort_request(["ends"])
    requests.step()
    ended = pool.get_num_free_blocks()
    deadline = time.monotonic() + 10
    while engine.core.scheduler.requests and time.monotonic() < deadline:
        engine.core.step_fn()
    return ended, pool.get_num_free_blocks()


def test_hf3fs_and_requests_that_change_or_end_midway(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    with hf3fs_files(tmp_path) as tier:
        assert tier.keys is not None
        keys = partial(call, function=MetadataServer(url_of(tier)).keys)
        first, second, *_ = prompts
        run = processes.run(
            _launch(models, tier),
            partial(exchange_midway, prompt=first, exchange=False),
            keys,
            partial(end_while_loading, prompt=first),
            partial(generate, prompts=[first], tokens=100),
            partial(exchange_midway, prompt=second),
            keys,
        )
    _, before, free, (again,), told, after = run.results
    # The control: what was generated is stored, too; and is there for a second time.
    assert len(before) == (len(first) + 99) // BLOCK
    assert again.loaded == whole_blocks([first])
    # Its blocks are given away when nothing is written into them any more.
    ended, later = free
    assert later - ended == whole_blocks([first]) // BLOCK
    assert told == [("HF3FSKVConnector", "r")]
    # Only what was stored until the exchange: the prompt.
    assert len(after) - len(before) == len(second) // BLOCK


def hash_tokens_alone(install: Any, role: str) -> None:
    """Make the connector's keys of tokens alone, in one of its halves or in both."""
    install()
    tamper.register()
    from kvprov.engines.vllm.hf3fs import HF3FSKVConnector

    bound = HF3FSKVConnector._compute_prefix_hash

    def hashed(self: Any, token_ids: Any, previous_hash: str = "") -> str:
        return str(bound(self, token_ids, previous_hash or ("tokens" if role in ("", self.role.name) else "")))

    HF3FSKVConnector._compute_prefix_hash = hashed  # type: ignore[method-assign]


def test_hf3fs_with_other_keys_than_bound_ones_does_not_start(
    processes: Processes, models: Models, tmp_path: Path
) -> None:
    said = {
        "": "HF3FSKVConnector's lookup gives one key to requests that differ in",
        "WORKER": "HF3FSKVConnector loads under other keys in a worker than it looks up",
    }
    with hf3fs_files(tmp_path) as tier:
        launch = _launch(models, tier)
        launches = [
            Launch(
                models.base, Path(), connector=launch.connector, before=partial(hash_tokens_alone, tier.before, role)
            )
            for role in said
        ]
        ended = processes.run_all([(launch, []) for launch in launches])
    for run, error in zip(ended, said.values(), strict=True):
        assert isinstance(run, EngineDiedError)
        assert run.message.startswith(f"BindingError: kvprov's self-check failed: {error}"), run


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"world_size": 1, "tensor_parallel_size": 1}, ""),
        ({"world_size": 8, "tensor_parallel_size": 8}, ""),
        ({"world_size": 4, "tensor_parallel_size": 2}, "4 workers and 2 such ranks"),
        ({"world_size": 2, "tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode context parallelism"),
    ],
)
def test_hf3fs_refuses_workers_that_its_files_do_not_tell_apart(shape: dict[str, int], said: str) -> None:
    from kvprov.engines.vllm.hf3fs import _check_shape

    with pytest.raises(BindingError, match=said) if said else nullcontext():
        _check_shape(SimpleNamespace(**shape))


def test_hf3fs_binds_ranks_and_media() -> None:
    """Neither is in vLLM's keys."""
    from kvprov.engines.vllm.hf3fs import HF3FSKVConnector
    from kvprov.engines.vllm.stamp import Stamp, set_stamp

    def start(ranks: int = 1, digest: str = "d", media: tuple[tuple[str, int], ...] = (("m", 3),)) -> str:
        features = [SimpleNamespace(identifier=i, mm_position=SimpleNamespace(offset=at)) for i, at in media]
        request = SimpleNamespace(mm_features=features)
        set_stamp(request, Stamp(digest, (("kvprov", digest),)))
        return str(HF3FSKVConnector._start_of(SimpleNamespace(_shape=f"tp={ranks}"), request))  # type: ignore[arg-type]

    assert start() == start()
    others = [start(2), start(digest="e"), start(media=()), start(media=(("m", 4),)), start(media=(("n", 3),))]
    assert len({start(), *others, start(media=(("m", 3), ("m", 9)))}) == 7


# MultiConnector.


def support(engine: Engine) -> tuple[str, bool, bool, int]:
    """What vLLM concluded of a connector: its class, hybrid cache support twice, and how many are below it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = engine.llm.llm_engine.vllm_config
    return (
        type(engine.core.scheduler.connector).__name__,
        KVConnectorFactory.supports_hma_config(config.kv_transfer_config),
        bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
        len(engine.core.scheduler.connector._connectors),
    )


def transfers(engine: Engine) -> float:
    """Return how much the offloading connector says that it moved."""
    return sum(getattr(m, "value", 0) for m in engine.llm.get_metrics() if m.name.startswith("vllm:kv_offload"))


@dataclass
class Multi:
    """What engines did that hand requests on to two connectors."""

    seeded: Run
    off: Run
    offloading: Run
    read: Run
    second_alone: Run
    nested: Run
    tampered: EngineDiedError


def nested_explicitly(prompts: Path, blocks: Path) -> dict[str, Any]:
    """A connector of each kind, each by an explicit module, and one of them another level below."""
    below = {**multi({**offloading(file_tier(blocks)), **EXPLICIT}), **EXPLICIT}
    return {**multi({**example(prompts), **EXPLICIT}, below), **EXPLICIT}


@pytest.fixture(scope="module")
def both(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Multi:
    folder = tmp_path_factory.mktemp("multi")
    ask, settle = partial(generate, prompts=prompts), partial(call, function=partial(time.sleep, 1))
    unknown = partial(ask, salt=NO_TEXT)
    count = partial(bypassed, reason="sharing_domain")
    (folder / "off").mkdir()
    (folder / "bound").mkdir()
    with over_two(folder / "off") as off, over_two(folder / "bound") as bound:
        assert bound.keys is not None
        keys = partial(call, function=bound.keys)
        seeded, unbound, below = processes.run_all(
            [
                (_launch(models, bound), [ask, settle, keys, unknown, settle, keys, count, transfers, support]),
                (_launch(models, off, "off"), [support]),
                (
                    Launch(
                        models.base,
                        Path(),
                        connector=offloading(file_tier(folder / "off")),
                        env=MULTIPROCESSING,
                        # Nobody knows weights that were made up.
                        args={"load_format": "dummy"},
                    ),
                    [ask, ask, partial(bypassed, reason="weights")],
                ),
            ]
        )
        roots = [folder / "bound" / name for name in ("prompts", "blocks")]
        alone, deep = folder / "alone", folder / "deep"
        shutil.copytree(roots[1], alone / "blocks")
        for root in roots:
            shutil.copytree(root, deep / root.name)
        (alone / "prompts").mkdir()
        with over_two(alone) as second:
            read, second_alone, nested, tampered = processes.run_all(
                [
                    (
                        _launch(models, bound),
                        [
                            partial(ask, salt="tenant"),
                            *(ask, transfers, partial(exchange_midway, prompt=models.random_prompt(70))),
                            *(ask, partial(bypassed, reason="weights")),
                        ],
                    ),
                    (_launch(models, second), [ask, partial(ask, adapter=models.adapter("inverted"))]),
                    (
                        Launch(models.base, Path(), connector=nested_explicitly(deep / "prompts", deep / "blocks")),
                        [ask, partial(ask, salt="tenant")],
                    ),
                    (
                        Launch(models.base, Path(), connector=bound.connector, before=tamper.ignore_identifiers),
                        [],
                    ),
                ]
            )
    assert isinstance(tampered, EngineDiedError)
    return Multi(ran(seeded), ran(unbound), ran(below), ran(read), ran(second_alone), ran(nested), tampered)


def test_multi_writes_to_both_and_reads_in_another_process(both: Multi, prompts: list[list[int]], full: int) -> None:
    first, _, keys, *_ = both.seeded.results
    blocks = [key for key in keys if "/" in key]
    assert len(keys) - len(blocks) == len(prompts)
    # OffloadingConnector stores blocks of prompts.
    assert len(blocks) == sum(len(prompt) // BLOCK for prompt in prompts)
    salted, own, *_ = both.read.results
    assert [loaded(answers) for answers in (first, salted, own)] == [0, 0, full]
    assert tokens(salted) == tokens(own) == tokens(first)
    assert "connector=MultiConnector(ExampleConnector+OffloadingConnector) " in both.seeded.log


def test_multi_reads_from_the_second_what_the_first_has_not(both: Multi, prompts: list[list[int]]) -> None:
    own, adapted = both.second_alone.results
    assert [loaded(answers) for answers in (own, adapted)] == [whole_blocks(prompts), 0]
    assert tokens(own) == tokens(both.seeded.results[0]) != tokens(adapted)


def test_multi_by_explicit_modules_and_nested(both: Multi, full: int) -> None:
    own, salted = both.nested.results
    assert [loaded(answers) for answers in (own, salted)] == [full, 0]
    assert tokens(own) == tokens(salted) == tokens(both.seeded.results[0])
    assert "connector=MultiConnector(ExampleConnector+OffloadingConnector) " in both.nested.log


def test_multi_keeps_what_nobody_knows_out_of_both_and_counts_it_once(both: Multi, prompts: list[list[int]]) -> None:
    _, _, before, unknown, _, after, count, moved, _ = both.seeded.results
    assert loaded(unknown) == 0
    assert before == after
    assert count == len(prompts)
    # What the connectors below measure arrives as well.
    assert moved > 0


def test_offloading_alone_counts_it_too(both: Multi, prompts: list[list[int]]) -> None:
    """With the engine core in a process of its own."""
    first, again, count = both.offloading.results
    assert loaded(first) == loaded(again) == 0
    assert count == 2 * len(prompts)


def test_multi_tells_both_of_a_request_that_changed(both: Multi, prompts: list[list[int]]) -> None:
    _, _, moved, told, after, count = both.read.results
    assert moved > 0
    assert told == [("ExampleConnector", "r"), ("OffloadingConnector", "r")]
    assert loaded(after) == 0
    assert count == len(prompts)


def test_multi_supports_what_stock_supports(both: Multi) -> None:
    assert both.seeded.results[-1] == both.off.results[0]
    assert both.off.results[0][0] == "MultiConnector"


def test_multi_checks_each_of_its_connectors(both: Multi) -> None:
    assert both.tampered.message.startswith(
        "BindingError: kvprov's self-check failed: ExampleConnector's lookup gives one key to requests that differ in"
    )


def test_multi_is_counted_where_operators_look(models: Models, prompts: list[list[int]], tmp_path: Path) -> None:
    """The engine core, which decides, is not the process that serves the metrics."""
    with over_two(tmp_path) as tier:
        transfer = {"kv_role": "kv_both", **tier.connector}
        with serve(tmp_path, tmp_path, env={}, transfer=transfer) as server:
            name = "vllm:kvprov_bypassed_requests_total"
            before = server.metric(name, reason="chunked prefill") or 0
            server.complete("base", [models.random_prompt(400)])
            after = server.metric(name, reason="chunked prefill") or 0
            server.complete("base", prompts)
            server.complete("base", prompts)
            metrics = server.get("/metrics")
        assert (before, after) == (0, 1)
        assert "vllm:kv_offload" in metrics
        assert len(folders(tmp_path / "prompts")) == len(prompts)
        assert files(tmp_path / "blocks")
