"""LMCacheMPConnector when things happen under way: adapters are exchanged beneath requests, servers and stores fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, Launch
from tests.support.lmcache_mp import LMCacheServer, fs_keys, fs_l2, lmcache_server, redis_l2
from tests.support.lmcache_mp_steps import (
    ENV,
    SETTLE,
    Place,
    Sent,
    full,
    keys,
    launch,
    named,
    place_in,
    record,
    recorded,
    sites,
)
from tests.support.models import BLOCK, BUNDLED, Models
from tests.support.processes import Processes
from tests.support.redis import redis_server
from tests.support.steps import call, generate, loaded, tokens

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    return models.prompts(3)


@pytest.fixture(scope="module")
def alone(processes: Processes, models: Models, prompts: list[list[int]]) -> dict[str, list[tuple[int, ...]]]:
    """What each adapter answers in an engine that shares nothing."""
    policies = {"standard": 1, "inverted": 2}
    steps = [
        partial(generate, prompts=prompts, adapter=models.adapter(policy, number), tokens=8)
        for policy, number in policies.items()
    ]
    run = processes.run(Launch(models.base, None, "off"), *steps)
    return {policy: tokens(answers) for policy, answers in zip(policies, run.results, strict=True)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_in(tmp_path_factory.mktemp("lmcache")) as place:
        yield place


# Requests under way beneath which an adapter is exchanged.


def put(policy: str, folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BUNDLED / "adapters" / policy, folder)


class Tenant:
    """A tenant's requests to an engine that steps when it is told to.

    Args:
        engine: The engine.
        folder: Of the tenant's adapter.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.llm = engine.llm.llm_engine

    def exchange(self, policy: str) -> None:
        from vllm.lora.request import LoRARequest

        put(policy, self.folder)
        self.llm.add_lora(LoRARequest("tenant", 1, str(self.folder), load_inplace=True))

    def add(self, prompt: list[int], count: int = 8) -> Any:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        parameters = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        lora = LoRARequest("tenant", 1, str(self.folder))
        prompted = {"prompt_token_ids": prompt, "cache_salt": "tenant-1"}
        self.llm.add_request(f"{time.monotonic_ns()}", prompted, parameters, lora_request=lora)
        return list(self.engine.core.scheduler.requests.values())[-1]

    def step_until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not ready():
            assert time.monotonic() < deadline
            self.llm.step()

    def finish(self) -> tuple[tuple[int, ...], int]:
        outputs: list[Any] = []
        while self.llm.has_unfinished_requests():
            outputs = self.llm.step() or outputs
        return tuple(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens or 0


def exchanges(engine: Engine, *, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    """Exchange a request's adapter beneath it, at each moment of its life."""
    put("standard", folder)
    tenant = Tenant(engine, folder)
    adapter = engine.core.scheduler.connector.scheduler_adapter
    record(engine)
    done: dict[str, Any] = {}
    short, long = prompts

    tenant.add(short)
    done["seed"] = tenant.finish()
    done["stored"] = recorded(engine)

    # It waits for the answer to a lookup.
    request = tenant.add(short)
    tenant.step_until(lambda: request.request_id in adapter._pending_lookups)
    tenant.exchange("inverted")
    done["looked up"] = tenant.finish()
    done["looked up, sent"] = recorded(engine)

    # It waits in the queue.
    tenant.add(short)
    tenant.exchange("standard")
    done["queued"] = tenant.finish()
    recorded(engine)

    # Its state is being loaded.
    request = tenant.add(short, count=40)
    tenant.step_until(lambda: request.status.name == "WAITING_FOR_REMOTE_KVS")
    tenant.exchange("inverted")
    recorded(engine)
    tenant.finish()
    done["loading, sent"] = recorded(engine)

    # It runs. Chunks of what it generates are stored, too; the second time, nobody disturbs it.
    for name in ("running", "undisturbed"):
        tenant.exchange("standard")
        request = tenant.add(long if name == "running" else long[::-1], count=100)
        tenant.step_until(lambda made=request: made.num_output_tokens >= 40)
        done[f"{name}, before"] = recorded(engine)
        if name == "running":
            tenant.exchange("inverted")
        tenant.finish()
        done[f"{name}, after"] = recorded(engine)

    # What was stored meanwhile belongs to whoever computed it.
    tenant.exchange("inverted")
    tenant.add(short)
    done["inverted"] = tenant.finish()
    tenant.exchange("standard")
    tenant.add(short)
    done["standard"] = tenant.finish()
    return done


@pytest.mark.parametrize("eager", [False, True], ids=["lookup when scheduled", "lookup ahead"])
def test_adapters_exchanged_beneath_requests_under_way(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    place: Place,
    alone: dict[str, list[tuple[int, ...]]],
    tmp_path: Path,
    eager: bool,
) -> None:
    standard, inverted = alone["standard"][0], alone["inverted"][0]
    extra = {"lmcache.mp.save_decode_cache": True, "lmcache.mp.eager_prefetch": eager}
    # Of this test alone: another one's entries would be hits.
    env = ENV | {"KVPROV_SECRET_KEY_ID": f"fleet-{int(eager)}"}
    both = [prompts[0], models.random_prompt(100, seed=3)]
    run = processes.run(
        launch(models.base, place.server, extra=extra, env=env),
        partial(exchanges, prompts=both, folder=tmp_path / "tenant"),
    )
    done, whole = run.results[0], full(prompts[:1])
    assert done["seed"] == (standard, 0)
    # The answer to the former question is not used, and not asked again; what is computed is stored as what it is.
    assert done["looked up"] == (inverted, 0)
    sent = done["looked up, sent"]
    assert "submit_retrieve" not in sites(sent)
    former, new = keys(done["stored"]), keys([one for one in sent if one.site == "submit_store"])
    assert len(former) == len(new) == 1
    assert former != new
    if eager:
        # It has looked up before the exchange, and so never again.
        assert done["queued"] == (standard, 0)
    else:
        assert done["queued"] == (standard, whole)
    # Here state of both is mixed, which nobody may have.
    assert "submit_store" not in sites(done["loading, sent"])
    assert "submit_store" in sites(done["running, before"]) & sites(done["undisturbed, before"])
    assert "submit_store" in sites(done["undisturbed, after"])
    assert "submit_store" not in sites(done["running, after"])
    assert done["inverted"] == (inverted, whole)
    assert done["standard"] == (standard, whole)


def lazily(engine: Engine, *, prompts: list[list[int]], folder: Path, exchange: bool) -> list[Sent]:
    """Return what is stored when blocks run out, after a request whose adapter may have been exchanged beneath it."""
    put("standard", folder)
    tenant = Tenant(engine, folder)
    record(engine)
    request = tenant.add(prompts[0], count=100)
    tenant.step_until(lambda: request.num_output_tokens >= 40)
    if exchange:
        tenant.exchange("inverted")
    tenant.finish()
    for prompt in prompts[1:]:
        tenant.add(prompt, count=4)
        tenant.finish()
    return [sent for sent in recorded(engine) if sent.site == "submit_store"]


@pytest.mark.parametrize("exchange", [False, True], ids=["undisturbed", "exchanged"])
def test_stores_put_off_are_dropped_with_what_they_were_bound_to(
    processes: Processes, models: Models, place: Place, tmp_path: Path, exchange: bool
) -> None:
    prompts = [models.random_prompt(100, seed=seed) for seed in range(100 * exchange, 100 * exchange + 8)]
    start = launch(
        models.base,
        place.server,
        args={"enable_prefix_caching": True, "num_gpu_blocks_override": 24, "max_num_seqs": 2},
        extra={"lmcache.mp.lazy_offload": True, "lmcache.mp.save_decode_cache": True},
    )
    step = partial(lazily, prompts=prompts, folder=tmp_path / "tenant", exchange=exchange)
    stored = processes.run(start, step).results[0]
    # Only the first request has more than three chunks. The others' are stored one way or the other.
    assert any(sent.end <= 3 * BLOCK for sent in stored)
    assert any(sent.end > 3 * BLOCK for sent in stored) is not exchange


# Faults, which stock and bound engines go through side by side.


def turn(_engine: Engine, *, name: str, who: str, folder: Path) -> None:
    """Say that it is the test's turn, and wait until it has taken it."""
    (folder / f"{name}-{who}").touch()
    deadline = time.monotonic() + 120
    while not (folder / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.05)


def take(folder: Path, name: str, action: Callable[[], Any]) -> Any:
    """Wait until all engines have come to this turn, act, and let them go on."""
    deadline = time.monotonic() + 200
    while not all((folder / f"{name}-{who}").exists() for who in MODES):
        assert time.monotonic() < deadline, name
        time.sleep(0.05)
    result = action()
    (folder / name).touch()
    return result


def once_loaded(engine: Engine, *, count: int, **request: Any) -> list[Answer]:
    """Ask until `count` tokens are loaded: an engine notices by its heartbeat that a server is back.

    A server that has only started may also find one chunk of a prompt and be late with the next.
    """
    deadline = time.monotonic() + 40
    while True:
        answers = engine.generate(**request)
        if loaded(answers) >= count or time.monotonic() > deadline:
            return answers
        time.sleep(0.2)


MODES = ("off", "enforce")


@dataclass(frozen=True)
class Faults:
    """A server, and what can befall it.

    Attributes:
        server: The server.
        keys: Lists the entries of its second tier.
        kill: Ends the part that is to fail.
        start: Starts it again.
        cut: Leaves only the first half of some entries.
    """

    server: LMCacheServer
    keys: Callable[[], list[str]]
    kill: Callable[[], None]
    start: Callable[[], None]
    cut: Callable[[list[str]], None]


@contextmanager
def fs_faults(folder: Path) -> Iterator[Faults]:
    """The LMCache server dies."""
    l2 = folder / "l2"
    l2.mkdir()

    def cut(names: list[str]) -> None:
        for name in names:
            file = l2 / f"{name}.data"
            os.truncate(file, file.stat().st_size // 2)

    with lmcache_server(folder, fs_l2(l2)) as server:
        yield Faults(server, partial(fs_keys, l2), server.kill, server.start, cut)


@contextmanager
def redis_faults(folder: Path) -> Iterator[Faults]:
    """Redis dies, which holds the second tier."""
    with redis_server(folder / "redis") as store, lmcache_server(folder, redis_l2(store)) as server:

        def start() -> None:
            store.start()
            # Else the server's memory would answer.
            server.restart()

        def cut(names: list[str]) -> None:
            for name in names:
                value = store.client.get(name)
                assert isinstance(value, bytes)
                store.client.set(name, value[: len(value) // 2])

        yield Faults(server, store.keys, store.kill, start, cut)


@pytest.mark.parametrize("faults", [fs_faults, redis_faults], ids=["server and its files", "redis"])
def test_faults_end_in_right_answers(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    alone: dict[str, list[tuple[int, ...]]],
    tmp_path: Path,
    faults: Callable[[Path], AbstractContextManager[Faults]],
) -> None:
    adapter = models.adapter("standard")
    whole = full(prompts[:1])

    def steps(who: str) -> dict[str, Any]:
        one = partial(generate, prompts=prompts[:1], adapter=adapter, salt=who, tokens=8)
        rest = partial(one, prompts=prompts[1:])
        until = partial(once_loaded, count=full(prompts[1:]), prompts=prompts[1:], adapter=adapter, salt=who, tokens=8)
        at = {name: partial(turn, name=name, who=who, folder=tmp_path) for name in ("listed", "dead", "back", "cut")}
        settle = partial(call, function=partial(time.sleep, SETTLE))
        return {
            "one": one,
            "settle": settle,
            "listed": at["listed"],
            "rest": rest,
            "settle again": settle,
            "dead": at["dead"],
            "one, dead": one,
            "rest, dead": rest,
            "back": at["back"],
            "rest, back": until,
            "one, back": one,
            "cut": at["cut"],
            "rest, cut": until,
            "one, cut": one,
        }

    with faults(tmp_path) as befalls, ThreadPoolExecutor(len(MODES)) as pool:
        runs = {
            who: pool.submit(named, processes, launch(models.base, befalls.server, who), steps(who)) for who in MODES
        }
        first = take(tmp_path, "listed", befalls.keys)
        take(tmp_path, "dead", befalls.kill)
        take(tmp_path, "back", befalls.start)

        def cut() -> None:
            befalls.cut(first)
            befalls.server.restart()

        take(tmp_path, "cut", cut)
        results = {who: run.result()[0] for who, run in runs.items()}
    assert len(first) == len(MODES) * whole // BLOCK
    for done in results.values():
        assert loaded(done["one"]) == loaded(done["rest"]) == 0
        for step, answers in done.items():
            if isinstance(answers, list):
                right = alone["standard"]
                assert tokens(answers) == (right[1:] if step.startswith("rest") else right[:1]), step
        # What is whole is loaded again, and what is cut is not.
        assert loaded(done["rest, back"]) == loaded(done["rest, cut"]) == full(prompts[1:])
        assert loaded(done["one, back"]) == whole
        assert loaded(done["one, cut"]) == 0
