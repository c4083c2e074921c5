"""LMCache's in-process form, bound: LMCacheConnectorV1 of real engines over real stores."""

from __future__ import annotations

import functools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprov.engines.lmcache import keys
from kvprov.errors import BindingError
from tests.support import lmcache_cpu
from tests.support.engine import Answer, Engine, Launch
from tests.support.models import Models
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.redis import RedisServer, redis_server
from tests.support.steps import bypassed, call, generate, loaded, same, tokens
from tests.support.tiers import Tier
from tests.support.tiers import lmcache as tiers

pytestmark = pytest.mark.engine


def launch(model: str, tier: Tier, mode: str = "enforce", **more: Any) -> Launch:
    made = Launch(model, Path(), mode, tier.env, connector={"kv_connector_extra_config": {}, **tier.connector})
    return replace(made, before=tier.before, **more)


def with_env(tier: Tier, **env: str) -> Tier:
    return replace(tier, env={**tier.env, **env})


def worker_connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def written(_engine: Engine, *, names: Callable[[], list[str]] | None = None, at_least: int = 0) -> None:
    """Wait until LMCache's threads have written what was stored, as far as can be seen.

    Args:
        names: Lists the store.
        at_least: So many names are there then.
    """
    backends = worker_connector()._lmcache_engine.lmcache_engine.storage_manager.storage_backends.values()
    lists = [b if hasattr(b, "put_tasks") else getattr(b, "disk_worker", None) for b in backends]
    before, since, deadline = -1, time.monotonic(), time.monotonic() + 60
    while time.monotonic() < deadline:
        now = len(names()) if names is not None else 0
        if now != before or now < at_least or any(getattr(holder, "put_tasks", ()) for holder in lists):
            before, since = now, time.monotonic()
        elif time.monotonic() > since + 0.4:
            return
        time.sleep(0.05)
    raise AssertionError(f"LMCache writes on, or not enough: {before} names")


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


def entries(names: list[str]) -> list[str]:
    """Return the keys of the entries of Redis names: LMCache keeps each in two."""
    return sorted(name.removesuffix("kv_bytes") for name in names if name.endswith("kv_bytes"))


# Which keys each access site derives.


def watch(engine: Engine) -> None:
    """Note, from now on, the keys that each of LMCache's access sites is handed."""
    connector = worker_connector()
    manager = connector._lmcache_engine.lmcache_engine.storage_manager
    sites: dict[str, set[str]] = {}
    engine.sites = sites  # type: ignore[attr-defined]

    def note(name: str, site: str) -> None:
        native = getattr(manager, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            found = kwargs["keys"] if "keys" in kwargs else args[0]
            found = found if isinstance(found, list | tuple) else [found]
            sites.setdefault(site, set()).update(key.to_string() for key in found)
            return native(*args, **kwargs)

        setattr(manager, name, noting)

    note("batched_contains", "lookup")
    note("batched_put", "store")
    note("batched_get", "load")
    note("batched_unpin", "release")
    note("remove", "evict")
    events = connector.get_kv_connector_kv_cache_events

    def collect() -> Any:
        found = events()
        for event in found.get_all_events() if found is not None else ():
            sites.setdefault("events", set()).update(value.hex() for value in event.block_hashes)
        return found

    connector.get_kv_connector_kv_cache_events = collect


def seen(engine: Engine) -> dict[str, list[str]]:
    """Return what was noted since the last time, and the facts that the keys cover."""
    sites = engine.sites  # type: ignore[attr-defined]
    found = {site: sorted(noted) for site, noted in sites.items()}
    sites.clear()
    return {**found, "facts": [worker_connector()._database._kvprov_facts.decode()]}


def evict(_engine: Engine, *, prompts: list[list[int]], text: str) -> int:
    """Evict by tokens, as LMCache does for whoever names the provenance; without it no key is made."""
    engine = worker_connector()._lmcache_engine.lmcache_engine
    with pytest.raises(BindingError, match="without provenance"):
        engine.clear(tokens=prompts[0])
    return sum(engine.clear(tokens=p, request_configs=keys.request_configs(text, False)) for p in prompts)


# Media and prompt embeddings, which the bundled model takes none of.


def probe_media(engine: Engine) -> tuple[list[str], list[str], str]:
    """Return the keys that requests with media are looked up and stored under, and why embeddings keep away."""
    from kvprov.engines.vllm.selfcheck import _probe_stamps, _request

    connector = engine.core.scheduler.connector
    stamp = _probe_stamps(connector._binding)[""]

    def request(*media: tuple[str, int, int]) -> Any:
        made = _request(32, stamp)
        made.mm_features = [
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
            for name, offset, length in media
        ]
        return made

    made = [
        request(),
        request(("cat", 31, 5)),
        request(("cat", 31, 5)),
        request(("dog", 31, 5)),
        request(("cat", 30, 5)),
        request(("cat", 31, 5), ("dog", 40, 5)),
    ]
    lookups, found = connector.kvprov_probe(made)
    embedded = request()
    embedded.prompt_embeds = object()
    assert connector.get_num_new_matched_tokens(embedded, 0) == (0, False)
    stored = [worker_connector().kvprov_entry_key(entry) for entry in found]
    return lookups, stored, connector.reason_to_bypass(embedded)


def tagged(models: Models, prompts: list[list[int]], **configs: Any) -> Step:
    ask = {"kv_transfer_params": configs}
    return partial(generate, prompts=prompts, tokens=8, adapter=models.adapter("standard"), extra_args=ask)


@dataclass
class Shared:
    """Two bound engines over one Redis, of another hash seed each, and what they did."""

    prompts: list[list[int]]
    isolated: dict[str, list[Answer]]
    first: Run
    second: Run
    names: list[str]
    tag_names: list[str]

    @property
    def full(self) -> int:
        return sum(tiers.loadable(len(prompt)) for prompt in self.prompts)


TAGS = {
    "two": {"lmcache.tag.team": "red", "lmcache.tag.app": "x"},
    "two in the other order": {"lmcache.tag.app": "x", "lmcache.tag.team": "red"},
    "one of them": {"lmcache.tag.team": "red"},
    "value and name exchanged": {"lmcache.tag.red": "team"},
    "separators": {"lmcache.tag.a@b%c": "d@e%f@" + "\u00e9" * 10_000},
    "ours": {"lmcache.tag.kvprov": "A" * 43},
    "a number": {"lmcache.tag.team": 5},
    "nothing to store": {"lmcache.tag.team": "blue", "lmcache.skip_save": True},
    "a transfer": {"disagg_spec": {"req_id": "x"}, "ret_first_tok": True},
}


NOT_STORED = ("a number", "nothing to store")


@pytest.fixture(scope="module")
def shared(processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("lmcache")
    prompts = models.prompts(4)
    standard, inverted = models.adapter("standard"), models.adapter("inverted", 2)
    renamed = models.adapter("standard", 3, "renamed", folder / "elsewhere")
    ask = partial(generate, prompts=prompts, tokens=8)
    with tiers.redis(folder / "redis") as tier:
        first_tier = with_env(tier, PYTHONHASHSEED="1", LMCACHE_ENABLE_KV_EVENTS="True")
        assert tier.keys is not None
        # Two names an entry.
        count = 2 * sum(tiers.loadable(len(prompt)) // tiers.CHUNK for prompt in prompts)
        first: list[Step] = [
            watch,
            partial(ask, adapter=standard, salt="tenant-1"),
            partial(written, names=tier.keys, at_least=count),
            partial(call, function=tier.keys),
            partial(ask, adapter=standard, salt="tenant-1"),
            seen,
            partial(ask, adapter=renamed, salt="tenant-1"),
            partial(ask, adapter=inverted, salt="tenant-1"),
            partial(ask, adapter=standard, salt="tenant-2"),
            partial(written, names=tier.keys, at_least=3 * count),
        ]
        namespaces = 3
        for name, configs in TAGS.items():
            namespaces += name not in ("two in the other order", *NOT_STORED)
            there = partial(written, names=tier.keys, at_least=namespaces * count)
            first += [tagged(models, prompts, **configs), there]
        first += [tagged(models, prompts, **configs) for configs in TAGS.values()]
        first += [partial(bypassed, reason="client_namespace"), probe_media]
        isolated, ended = processes.run_all(
            [
                (
                    Launch(models.base, None, "off"),
                    [partial(ask, adapter=standard), partial(ask, adapter=inverted)],
                ),
                (launch(models.base, first_tier), first),
            ]
        )
        names = ran(ended).results[3]
        text = entries(names)[0].rpartition("%")[2]
        second: list[Step] = [
            watch,
            partial(ask, adapter=renamed, salt="tenant-1"),
            partial(ask, adapter=inverted, salt="tenant-1"),
            partial(ask, adapter=standard, salt="tenant-3"),
            seen,
            partial(evict, prompts=prompts, text=text),
            seen,
        ]
        tag_names = tier.keys()
        after = processes.run(launch(models.base, with_env(tier, PYTHONHASHSEED="2")), *second)
        yield Shared(
            prompts,
            dict(zip(("standard", "inverted"), ran(isolated).results, strict=True)),
            ran(ended),
            after,
            names,
            tag_names,
        )


def test_own_state_is_read_in_full_and_no_other(shared: Shared) -> None:
    cold, again, renamed, inverted, other = (shared.first.results[i] for i in (1, 4, 6, 7, 8))
    full = shared.full
    assert [loaded(a) for a in (cold, again, renamed, inverted, other)] == [0, full, full, 0, 0]
    assert full > 0
    for answers in (cold, again, renamed, other):
        assert same(answers, shared.isolated["standard"])
    assert same(inverted, shared.isolated["inverted"])
    assert tokens(inverted) != tokens(cold)


def test_another_process_with_another_hash_seed_reads_it(shared: Shared) -> None:
    """Adapters are what their bytes are, here as well; and the salt separates."""
    renamed, inverted, other = shared.second.results[1:4]
    assert [loaded(a) for a in (renamed, inverted, other)] == [shared.full, shared.full, 0]
    assert same(renamed, shared.isolated["standard"])
    assert same(inverted, shared.isolated["inverted"])
    assert same(other, shared.isolated["standard"])


def test_every_access_site_derives_the_same_keys(shared: Shared) -> None:
    sites = shared.first.results[5]
    evicted = shared.second.results[6]
    stored = sites["store"]
    assert len(stored) == shared.full // tiers.CHUNK
    assert sites["lookup"] == sites["load"] == sites["release"] == entries(shared.names) == stored
    assert evicted["evict"] == stored
    hashes = sorted(key.split("@")[3].rjust(64, "0") for key in stored)
    assert sites["events"] == hashes
    # The very same in this process, whose hash seed is another: from tokens, facts and the tag alone.
    facts, text = sites["facts"][0].encode(), stored[0].rpartition("%")[2]
    assert {key.rpartition("@")[2] for key in stored} == {f"kvprov%{text}"}
    expected = set()
    for prompt in shared.prompts:
        state = keys.chain_start()
        for start in range(0, len(prompt) // tiers.CHUNK * tiers.CHUNK, tiers.CHUNK):
            state = keys.chain(state, prompt[start : start + tiers.CHUNK])
            expected.add(f"{keys.chunk_hash(facts, text, state):064x}")
    assert sorted(expected) == hashes


def test_keys_and_logs_show_neither_salt_nor_path_nor_tag(shared: Shared, models: Models) -> None:
    for name in shared.tag_names:
        assert name.startswith("kvprov@1@0@")
        assert len(name.removesuffix("kv_bytes").removesuffix("metadata")) <= 135
        for word in ("tenant", "team", "red", models.base, "tiny"):
            assert word not in name
    assert "tenant-1" not in shared.first.log


def test_a_clients_tags_separate_whatever_they_are(shared: Shared) -> None:
    start = 10
    first = dict(zip(TAGS, shared.first.results[start : start + 2 * len(TAGS) : 2], strict=True))
    again = dict(zip(TAGS, shared.first.results[start + 2 * len(TAGS) :][: len(TAGS)], strict=True))
    full = shared.full
    # A transfer is no tag: like no tags at all, of which this is the first here.
    assert {name: loaded(answers) for name, answers in first.items()} == {
        "two": 0,
        "two in the other order": full,
        "one of them": 0,
        "value and name exchanged": 0,
        "separators": 0,
        "ours": 0,
        "a number": 0,
        "nothing to store": 0,
        "a transfer": 0,
    }
    assert {name: loaded(answers) for name, answers in again.items()} == {
        name: 0 if name in NOT_STORED else full for name in TAGS
    }
    for answers in (*first.values(), *again.values()):
        assert same(answers, shared.isolated["standard"])
    assert shared.first.results[-2] == 2 * len(shared.prompts)


def test_media_and_embeddings(shared: Shared) -> None:
    lookups, stored, reason = shared.first.results[-1]
    assert stored == lookups
    plain, cat, same_cat, dog, moved, both = lookups
    assert cat == same_cat
    assert len({plain, cat, dog, moved, both}) == 5
    # Also of the chunk that holds one token of the medium only, in which LMCache has 31 bits of it.
    assert len({key.split("|")[0] for key in lookups}) == 5
    assert reason.startswith("prompt embeddings")


# What stock does, with and without kvprov in the process.


@pytest.fixture(scope="module")
def stock(processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    prompts = models.prompts(2)
    ask = partial(generate, prompts=prompts, tokens=8)
    standard, inverted = models.adapter("standard"), models.adapter("inverted", 2)
    steps: list[Step] = [
        partial(ask, adapter=standard, salt="tenant-1", extra_args={"kv_transfer_params": TAGS["one of them"]}),
        written,
        partial(ask, adapter=inverted, salt="tenant-2", extra_args={"kv_transfer_params": TAGS["one of them"]}),
    ]
    names = {}
    with (
        tiers.redis(tmp_path_factory.mktemp("off")) as off,
        tiers.redis(tmp_path_factory.mktemp("absent")) as absent,
    ):
        runs = [
            (launch(models.base, off, "off"), steps),
            (launch(models.base, with_env(absent, VLLM_PLUGINS="")), steps),
        ]
        ended = dict(zip(("off", "absent"), map(ran, processes.run_all(runs)), strict=True))
        for name, tier in (("off", off), ("absent", absent)):
            assert tier.keys is not None
            names[name] = entries(tier.keys())
    return {"names": names, "runs": ended, "full": sum(tiers.loadable(len(prompt)) for prompt in prompts)}


def test_mode_off_leaves_stocks_keys(stock: dict[str, Any], models: Models) -> None:
    off, absent = (stock["names"][name] for name in ("off", "absent"))
    assert off == absent
    assert len(off) == stock["full"] // tiers.CHUNK
    assert all(name.startswith(f"{models.base}@1@0@") and name.endswith("@bfloat16@team%red") for name in off)
    assert "kvprov: mode=off" in stock["runs"]["off"].log
    assert "kvprov:" not in stock["runs"]["absent"].log


def test_stock_reads_foreign_state(stock: dict[str, Any]) -> None:
    """Else nothing above would be shown."""
    for run in stock["runs"].values():
        assert [loaded(run.results[i]) for i in (0, 2)] == [0, stock["full"]]


# Requests under way, beneath which the weights are exchanged.

TIGHT = {
    "max_model_len": 320,
    "num_gpu_blocks_override": 11,
    "max_num_seqs": 4,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 128,
    "long_prefill_token_threshold": 64,
    "enable_lora": False,
}
"""Room for one prompt at a time, which is computed in parts: a second one is looked up meanwhile, and waits."""


def reload(engine: Engine, *, weights: str) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})


def exchange(engine: Engine, *, running: list[int], waiting: list[int], weights: str) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    connector = engine.core.scheduler.connector
    impl, worker = connector._lmcache_engine, worker_connector()._lmcache_engine.lmcache_engine

    def state() -> dict[str, list[str]]:
        kept = {
            "pins": worker.lookup_pins,
            "loads": impl.load_specs,
            "found": impl.lookup_client.reqs_status,
            "followed": impl._request_trackers,
        }
        return {name: sorted(key.partition("-")[0] for key in held) for name, held in kept.items()}

    parameters = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, logprobs=0)
    llm.add_request("running", {"prompt_token_ids": running}, parameters)
    llm.step()
    llm.add_request("waiting", {"prompt_token_ids": waiting}, parameters)
    llm.step()
    before = state()
    computed = [r.num_computed_tokens for r in engine.core.scheduler.running]
    reload(engine, weights=weights)
    after = state()
    outputs = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            outputs[output.request_id] = output
    done = outputs["waiting"]
    return {
        "before": before,
        "after": after,
        "end": state(),
        "computed": computed[0],
        "answer": Answer(
            tokens=tuple(done.outputs[0].token_ids),
            logprobs=tuple(
                step[token].logprob
                for token, step in zip(done.outputs[0].token_ids, done.outputs[0].logprobs, strict=True)
            ),
            loaded=done.num_cached_tokens,
        ),
    }


def test_weights_exchanged_beneath_requests_that_wait_and_run(
    processes: Processes, models: Models, tmp_path: Path
) -> None:
    running, waiting = models.random_prompt(250, 1), models.random_prompt(200, 2)
    other = models.copy_base(tmp_path / "other")
    models.perturb(Path(other))
    ask = partial(generate, prompts=[waiting], tokens=8)
    with tiers.redis(tmp_path / "redis") as tier:
        assert tier.keys is not None
        listed = partial(call, function=tier.keys)
        steps: list[Step] = [
            ask,
            partial(written, names=tier.keys, at_least=2 * 6),
            partial(exchange, running=running, waiting=waiting, weights=other),
            partial(written, names=tier.keys, at_least=2 * 18),
            listed,
            ask,
        ]
        bound, isolated = processes.run_all(
            [
                (launch(models.base, tier, args=TIGHT), steps),
                (Launch(models.base, None, "off", args=TIGHT), [partial(reload, weights=other), ask]),
            ]
        )
    cold, _, result, _, names, again = ran(bound).results
    assert loaded(cold) == 0
    assert result["before"] == {
        "pins": ["waiting"],
        "loads": ["waiting"],
        "found": ["waiting"],
        "followed": ["running"],
    }
    assert result["after"] == {"pins": [], "loads": [], "found": [], "followed": []}
    # LMCache forgets a finished request one step later.
    assert result["end"] == {"pins": [], "loads": [], "found": [], "followed": ["waiting"]}
    # What waited found entries of the former weights, and is computed with the new ones.
    assert result["answer"].loaded == 0
    assert same([result["answer"]], ran(isolated).results[1])
    assert not same([result["answer"]], cold)
    # Six chunks of what waited under each weights; of what ran, those that were computed before, and not the seventh.
    assert result["computed"] == 192
    assert len(entries(names)) == 6 + 6 + 6
    assert loaded(again) == 192
    assert same(again, ran(isolated).results[1])


SCARCE = {
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "enable_lora": False,
}
"""Room for two of four requests when they are fully grown: the others are preempted and resume."""


def count_preemptions(engine: Engine, **request: Any) -> tuple[list[Answer], int]:
    answers = engine.generate(**request)
    return answers, int(sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"))


def test_requests_that_are_preempted_and_resume(processes: Processes, models: Models, tmp_path: Path) -> None:
    """Also where they keep away from the tier: LMCache must not be asked to go on with what it never began."""
    prompts = [models.random_prompt(100, seed) for seed in range(4)]
    ask = partial(count_preemptions, prompts=prompts, tokens=200)
    unknown = partial(ask, extra_args={"kv_transfer_params": TAGS["a number"]})
    with tiers.redis(tmp_path / "redis") as tier:
        assert tier.keys is not None
        steps: list[Step] = [
            unknown,
            partial(written, names=tier.keys),
            partial(call, function=tier.keys),
            ask,
            partial(written, names=tier.keys, at_least=2 * 4 * 3),
            ask,
        ]
        runs = [
            (launch(models.base, tier, args=SCARCE), steps),
            (Launch(models.base, None, "off", args={"enable_lora": False}), [ask]),
        ]
        bound, isolated = map(ran, processes.run_all(runs))
    expected, _ = isolated.results[0]
    (away, first), _, names, (cold, second), _, (warm, third) = bound.results
    assert 0 < first < second < third
    assert names == []
    assert loaded(away) == 0
    assert loaded(warm) >= 4 * 96
    for answers in (away, cold, warm):
        assert tokens(answers) == tokens(expected)


# Faults.


def cut(_engine: Engine, *, folder: Path, size: int, every: int = 1) -> int:
    """Shorten entries on disk."""
    files = sorted(folder.iterdir())[::every]
    for file in files:
        os.truncate(file, size)
    return len(files)


RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def faulty(tier: Tier) -> Tier:
    return replace(tier, connector={**tier.connector, **RECOMPUTE})


def test_entries_that_were_cut_short_are_not_used(processes: Processes, models: Models, tmp_path: Path) -> None:
    """LMCache fills up what is missing with what was in its memory before: here, state of another prompt."""
    prompts = [models.random_prompt(n, seed) for seed, n in enumerate((70, 100, 40, 150))]
    ask = partial(generate, prompts=prompts, tokens=8, one_by_one=True, adapter=models.adapter("standard"))
    full = sum(tiers.loadable(len(prompt)) for prompt in prompts)
    runs: list[tuple[Launch, list[Step]]] = [(Launch(models.base, None, "off"), [ask])]
    with tiers.local_disk(tmp_path / "bound") as bound, tiers.local_disk(tmp_path / "stock") as stock_tier:
        for tier, mode, folder in ((bound, "enforce", "bound"), (stock_tier, "off", "stock")):
            alone = faulty(with_env(tier, LMCACHE_LOCAL_CPU="False"))
            shorten = partial(cut, folder=tmp_path / folder / "entries", size=40_000)
            runs.append((launch(models.base, alone, mode), [ask, written, ask, shorten, ask, written, ask]))
        with tiers.disk(tmp_path / "fs") as remote:
            # Twenty of 32 tokens, which LMCache takes for a shorter chunk.
            shorten = partial(cut, folder=tmp_path / "fs" / "entries", size=20 * 2048)
            runs.append((launch(models.base, faulty(remote)), [ask, written, ask, shorten, ask]))
            isolated, ours, theirs, fs = processes.run_all(runs)
    expected = ran(isolated).results[0]
    cold, _, warm, shortened, after, _, again = ran(ours).results
    assert shortened > 0
    assert [loaded(a) for a in (cold, warm)] == [0, full]
    for answers in (cold, warm, after, again):
        assert tokens(answers) == tokens(expected)
    # What was cut is written anew.
    assert loaded(again) == full
    if isinstance(theirs, Run):
        assert tokens(theirs.results[2]) == tokens(expected)
        assert tokens(theirs.results[4]) != tokens(expected), "stock uses what was cut: else nothing is shown"
    cold, _, warm, shortened, after = ran(fs).results
    assert [loaded(a) for a in (cold, warm)] == [0, full]
    assert tokens(cold) == tokens(warm) == tokens(after) == tokens(expected)


def limit_files(_engine: Engine, *, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_disk_that_is_full(processes: Processes, models: Models, tmp_path: Path) -> None:
    """Entries of 128 tokens have 256 KiB; no file may grow beyond 200 KiB. Then there is room again."""
    prompts = [models.random_prompt(n, seed) for seed, n in enumerate((140, 300))]
    ask = partial(generate, prompts=prompts, tokens=8, adapter=models.adapter("standard"))
    with tiers.local_disk(tmp_path / "disk") as tier:
        alone = with_env(tier, LMCACHE_LOCAL_CPU="False", LMCACHE_CHUNK_SIZE="128")
        # What could not be written stays on LMCache's list for ever.
        pause = partial(call, function=partial(time.sleep, 0.5))
        full, room = partial(limit_files, size=200 << 10), partial(limit_files, size=resource.RLIM_INFINITY)
        runs = [
            (launch(models.base, faulty(alone)), [full, ask, pause, ask, room]),
            (Launch(models.base, None, "off"), [ask]),
        ]
        bound, isolated = map(ran, processes.run_all(runs))
        sizes = {path.stat().st_size for path in (tmp_path / "disk" / "entries").iterdir()}
    assert sizes == {200 << 10}
    for step in (1, 3):
        assert loaded(bound.results[step]) == 0
        assert tokens(bound.results[step]) == tokens(isolated.results[0])


@contextmanager
def meanwhile(folder: Path, action: Callable[[], None]) -> Iterator[Step]:
    """Give a step during which `action` is taken in the test's own process."""
    folder.mkdir()
    asked, done = folder / "asked", folder / "done"
    stop = threading.Event()

    def act() -> None:
        while not asked.exists() and not stop.is_set():
            time.sleep(0.02)
        if not stop.is_set():
            action()
            done.touch()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield partial(rendezvous, asked=asked, done=done)
    finally:
        stop.set()
        thread.join()


def rendezvous(_engine: Engine, *, asked: Path, done: Path) -> None:
    asked.touch()
    deadline = time.monotonic() + 60
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask_until_loaded(engine: Engine, *, ask: Step, wanted: int) -> list[Answer]:
    """Ask again until LMCache has found its store again, which takes it some requests, but not for ever."""
    answers: list[Answer] = ask(engine)
    deadline = time.monotonic() + 90
    while loaded(answers) < wanted and time.monotonic() < deadline:
        time.sleep(0.5)
        answers = ask(engine)
    return answers


def redis_tier(server: RedisServer) -> Tier:
    return Tier(
        "redis",
        {"kv_connector": "LMCacheConnectorV1"},
        tiers.environment(remote_url=f"redis://{server.host}:{server.port}", remote_serde="naive"),
        before=lmcache_cpu.install,
    )


def test_stores_that_die_and_come_back(processes: Processes, models: Models, tmp_path: Path) -> None:
    prompts = models.prompts(4)
    ask = partial(generate, prompts=prompts, tokens=8, adapter=models.adapter("standard"), salt="tenant-1")
    full = sum(tiers.loadable(len(prompt)) for prompt in prompts)
    back = partial(ask_until_loaded, ask=ask, wanted=full)
    with (
        tiers.lm_server(tmp_path / "lm") as lm,
        redis_server(tmp_path / "redis") as redis,
        meanwhile(tmp_path / "one", lm.kill) as kill,
        meanwhile(tmp_path / "two", redis.restart) as restart,
    ):
        runs = [
            (Launch(models.base, None, "off"), [ask]),
            (launch(models.base, faulty(lm.tier())), [ask, written, ask, kill, ask, ask]),
            (launch(models.base, faulty(redis_tier(redis))), [ask, written, ask, restart, ask, back]),
        ]
        isolated, killed, restarted = map(ran, processes.run_all(runs))
    for run in (killed, restarted):
        assert [loaded(run.results[i]) for i in (0, 2)] == [0, full]
        for step in (0, 2, 4, 5):
            assert tokens(run.results[step]) == tokens(isolated.results[0])
    assert [loaded(killed.results[i]) for i in (4, 5)] == [0, 0]
    assert loaded(restarted.results[5]) == full


# Engines that must not start.


def other_facts_in_the_worker() -> None:
    lmcache_cpu.install()
    from kvprov.engines.vllm import lmcache

    native, calls = lmcache._facts, iter((1, 2))

    def facts(*args: Any) -> Any:
        return replace(native(*args), heads=next(calls))

    lmcache._facts = facts


def tags_dropped_when_storing() -> None:
    lmcache_cpu.install()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    native = KVConnectorFactory.create_connector

    @functools.wraps(native)
    def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = native(*args, **kwargs)
        from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

        build = RequestTracker.from_new_request

        def without_tags(*args: Any, **kwargs: Any) -> Any:
            tracker = build(*args, **kwargs)
            tracker.request_configs = None
            return tracker

        RequestTracker.from_new_request = staticmethod(without_tags)
        return made

    KVConnectorFactory.create_connector = classmethod(create_connector)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a form that drops tags": (
        {"kv_connector_extra_config": {"lmcache.use_layerwise": True}},
        "is configured with use_layerwise",
    ),
    "vLLM's older copy": ({"kv_connector_extra_config": {"use_native": True}}, "is configured with use_native"),
    "other facts in the worker": ({}, "loads under other keys in a worker than it looks up"),
    "tags dropped": ({}, "without provenance"),
    "no copies for this device": ({}, "LMCache did not start"),
}
BEFORE: dict[str, Callable[[], None] | None] = {
    "other facts in the worker": other_facts_in_the_worker,
    "tags dropped": tags_dropped_when_storing,
    "no copies for this device": None,
}


@pytest.fixture(scope="module")
def refusals(
    processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run | EngineDiedError]:
    with tiers.local_disk(tmp_path_factory.mktemp("refused") / "disk") as tier:
        runs: list[tuple[Launch, list[Step]]] = [
            (
                launch(
                    models.base,
                    replace(
                        tier, connector={**tier.connector, **connector}, before=BEFORE.get(name, lmcache_cpu.install)
                    ),
                ),
                [],
            )
            for name, (connector, _) in REFUSALS.items()
        ]
        return dict(zip(REFUSALS, processes.run_all(runs), strict=True))


@pytest.mark.parametrize("name", REFUSALS)
def test_an_engine_that_could_not_be_bound_does_not_start(
    refusals: dict[str, Run | EngineDiedError], name: str
) -> None:
    ended = refusals[name]
    assert isinstance(ended, EngineDiedError)
    assert REFUSALS[name][1] in str(ended.message) + ended.log
    assert "BindingError" in ended.message
