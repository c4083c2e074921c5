"""LMCacheMPConnector against real LMCache servers: one key at each access, and none of anybody else's.

That every dimension separates, and equal provenance shares, is tested for all tiers alike; here is what is special.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprov.engines.lmcache.http import Announced, announced, prefetch_body, request_salt
from kvprov.identity.domain import FleetSecret
from tests.support.engine import Answer, Engine, Launch
from tests.support.lmcache_mp import LMCacheServer, encoded, fs_keys, fs_l2, lmcache_server, redis_l2
from tests.support.models import BLOCK, BUNDLED, Models
from tests.support.processes import EngineDiedError, Processes
from tests.support.redis import redis_server
from tests.support.steps import bypassed, call, generate, loaded, tokens
from tests.support.tiers.lmcache_mp import ARGS

pytestmark = pytest.mark.engine

SETTLE = 1.5
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
SECRET = FleetSecret(b"a fleet secret of more than sixteen bytes", "fleet")
ENV = {"KVPROV_SECRET": SECRET.key.decode(), "KVPROV_SECRET_KEY_ID": SECRET.key_id}


def full(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens a warm store gives: whole chunks, and never the last token."""
    return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def launch(model: str, server: LMCacheServer, mode: str = "enforce", **more: Any) -> Launch:
    env, args, extra = more.pop("env", ENV), more.pop("args", {}), more.pop("extra", {})
    # The folder is not used: the connector's configuration replaces that of ExampleConnector.
    return Launch(model, server.log.parent, mode, env, ARGS | args, server.connector(**extra), **more)


# What a connector's two halves send.


@dataclass(frozen=True)
class Sent:
    """One message to the server, or one transfer, as far as it names entries."""

    site: str
    model_name: str = ""
    salt: str = ""
    start: int = 0
    end: int = 0


def record(engine: Engine) -> None:
    """Note from now on what is sent."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    sent: list[Sent] = []
    engine.sent = sent  # type: ignore[attr-defined]

    def noting(owner: Any, name: str, key_at: int) -> None:
        native = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            key = args[key_at] if key_at >= 0 else None
            if key is None:
                sent.append(Sent(name))
            else:
                sent.append(Sent(name, key.model_name, key.cache_salt, key.start, key.end))
            return native(*args, **kwargs)

        setattr(owner, name, noted)

    for client in engine.core.scheduler.connector.scheduler_adapter.req_clients.values():
        noting(client, "lookup", 0)
        noting(client, "free_lookup_locks", 0)
        noting(client, "end_session", -1)
    transfer = get_kv_transfer_group().worker_adapter.transfer_ctx
    noting(transfer, "submit_store", 1)
    noting(transfer, "submit_retrieve", 1)


def recorded(engine: Engine) -> list[Sent]:
    """Return what was sent since the last call."""
    sent = list(engine.sent)  # type: ignore[attr-defined]
    engine.sent.clear()  # type: ignore[attr-defined]
    return sent


def sites(sent: Sequence[Sent]) -> set[str]:
    return {one.site for one in sent}


def keys(sent: Sequence[Sent]) -> set[tuple[str, str]]:
    return {(one.model_name, one.salt) for one in sent if one.site != "end_session"}


# Steps.


def embed(engine: Engine, *, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """Complete a prompt given as embeddings: its tokens, and how many tokens were loaded from the store."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    table = load_file(BUNDLED / "base" / "model.safetensors")["model.embed_tokens.weight"]
    before = engine.external_hits()
    parameters = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    output = engine.llm.generate([{"prompt_embeds": table[prompt]}], parameters, use_tqdm=False)[0]
    return tuple(output.outputs[0].token_ids), engine.external_hits() - before


def makes_events(_engine: Engine) -> bool:
    """Whether LMCache makes KV events in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return bool(get_kv_transfer_group().worker_adapter._kv_events_enabled)


def attempt(engine: Engine, **request: Any) -> Any:
    """Return the answers, or what the engine died of."""
    try:
        return engine.generate(**request)
    except Exception as error:  # noqa: BLE001 - it is the test's business
        return f"{type(error).__name__}: {error}"


def refused(_engine: Engine, *, function: Callable[[], Any]) -> Any:
    """Return what a call of an HTTP interface returns, or the status it refuses with."""
    import urllib.error

    try:
        return function()
    except urllib.error.HTTPError as error:
        return error.code


def media_keys(engine: Engine) -> dict[str, Any]:
    """Return the keys of requests that differ in their media, and the tokens that stock makes keys of."""
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
    from lmcache.integration.vllm.utils import mm_hash_to_token_values
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    from kvprov.engines.vllm.stamp import Stamp, set_stamp

    def request(*media: tuple[str, int]) -> Any:
        features = [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, 1)) for name, at in media]
        made = Request(secrets.token_hex(8), list(range(1, 70)), SamplingParams(), None, mm_features=features)
        set_stamp(made, Stamp("T" * 43, (("kvprov", "T"),)))
        return made

    # Two names that LMCache's 31 bits for an item of one place do not tell apart.
    seen: dict[Any, str] = {}
    name, number = "", 0
    while not name:
        values = mm_hash_to_token_values(f"image-{number}", 1)
        if values in seen:
            one, name = seen[values], f"image-{number}"
        seen[values], number = f"image-{number}", number + 1
    cases = {
        "one": request((one, 3)),
        "one again": request((one, 3)),
        "colliding": request((name, 3)),
        "elsewhere": request((one, 40)),
        "two": request((one, 3), (name, 40)),
        "none": request(),
    }
    connector, worker = engine.core.scheduler.connector, get_kv_transfer_group()
    lookups, entries = connector.kvprov_probe(list(cases.values()))
    return {
        "native": {case: LMCacheMPRequestTracker(made).get_token_ids() for case, made in cases.items()},
        "lookup": dict(zip(cases, lookups, strict=True)),
        "transfer": {case: worker.kvprov_entry_key(entry) for case, entry in zip(cases, entries, strict=True)},
    }


# One writer, then a reader of the same provenance after the server has lost all but its second tier.


@dataclass(frozen=True)
class Place:
    """A server and the folder of its second tier."""

    server: LMCacheServer
    l2: Path


@dataclass(frozen=True)
class Shared:
    """What writer and reader did, by step."""

    worker: Announced
    log: str
    isolated: dict[str, Any]
    writer: dict[str, Any]
    written: list[str]
    reader: dict[str, Any]
    left: list[str]

    def salt(self, tenant: str) -> str:
        return request_salt(self.worker, adapter=BUNDLED / "adapters" / "standard", tenant_salt=tenant, secret=SECRET)


OPTIONS = {f"option {n}": value for n, value in enumerate(("8", -1, True, 1.5, [1]))}
"""What no client may send for a number of tokens."""

SALTS = {f"salt {n}": salt for n, salt in enumerate(("a@b", "a/b", "\\", "\0", "x" * 200))}
"""What LMCache takes for no salt."""


def option(value: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"lmcache.max_offload_tokens": value}}


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    return models.prompts(3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("lmcache")
    (folder / "l2").mkdir()
    with lmcache_server(folder, fs_l2(folder / "l2")) as server:
        yield Place(server, folder / "l2")


def named(processes: Processes, start: Launch, steps: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run an engine, and return what its steps returned, by name, and its log."""
    run = processes.run(start, *steps.values())
    return dict(zip(steps, run.results, strict=True)), run.log


@pytest.fixture(scope="module")
def shared(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    place: Place,
    tmp_path_factory: pytest.TempPathFactory,
) -> Shared:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    settle = partial(call, function=partial(time.sleep, SETTLE))
    one = partial(generate, prompts=prompts, adapter=models.adapter("standard"), tokens=8)
    longer = [prompts[0] + models.random_prompt(70, seed=1)]
    embeds = partial(embed, prompt=models.random_prompt(100, seed=7))
    isolated, _ = named(
        processes,
        Launch(models.base, None, "off", args={"enable_prompt_embeds": True}),
        {"embeddings": embeds, "one": one},
    )

    # The engine's own prefix cache is on: what it holds, the connector gives back to the server unread.
    writer, log = named(
        processes,
        launch(
            models.base,
            place.server,
            args={
                "enable_prefix_caching": True,
                "enable_prompt_embeds": True,
                **EVENTS,
            },
        ),
        {
            "record": record,
            "embeddings": embeds,
            "no text": partial(generate, prompts=prompts[:1], salt=5, tokens=1),
            "settle": settle,
            "bypassed": recorded,
            "counted": partial(bypassed, reason="prompt embeddings"),
            "entries": partial(call, function=partial(fs_keys, place.l2)),
            "first": partial(one, salt="tenant-1"),
            "again": partial(one, salt="tenant-1"),
            "longer": partial(one, prompts=longer, salt="tenant-1"),
            "sent": recorded,
            "events": makes_events,
            "other tenant": partial(one, salt="tenant-2"),
            "settle again": settle,
        },
    )
    written = fs_keys(place.l2)
    done = Shared(announced(log.splitlines()), log, isolated, writer, written, {}, [])
    place.server.restart()

    http, mine, name = place.server.http, done.salt("tenant-1"), done.worker.model_name
    body = prefetch_body(done.worker, prompts[0], mine)

    def prefetch(**other: Any) -> Any:
        return partial(refused, function=partial(http.prefetch, body | other))

    two = partial(one, adapter=models.adapter("standard", 2, "renamed", elsewhere / "adapter"))
    single = partial(two, prompts=prompts[:1], tokens=1)
    claims = dict.fromkeys(("lmcache.cache_salt", "lmcache.tag.kvprov", "cache_salt", "kvprov"), mine)
    doomed = [encoded(entry) for entry in written if entry.endswith(f"@{mine}")]
    reader, _ = named(
        processes,
        launch(models.copy_base(elsewhere / "model"), place.server),
        {
            "record": record,
            "raw salt": prefetch(cache_salt="tenant-1"),
            "raw model": prefetch(model_name=models.base),
            "prefetched": prefetch(),
            "own": partial(two, salt="tenant-1"),
            "sent": recorded,
            "claims": partial(
                single, salt="tenant-3", extra_args={"kv_transfer_params": claims | {"cached_token_stats": True}}
            ),
            "digest": partial(single, salt=mine),
            "marked digest": partial(single, salt=f"kvprov:{mine}"),
            **{n: partial(single, salt=n, extra_args=option(value)) for n, value in OPTIONS.items()},
            "capped": partial(single, salt="capped", extra_args=option(BLOCK)),
            **{n: partial(single, salt=salt) for n, salt in SALTS.items()},
            **{f"{n} again": partial(single, salt=salt) for n, salt in SALTS.items()},
            "capped again": partial(single, salt="capped", extra_args=option(BLOCK)),
            "media": media_keys,
            "settle": settle,
            "delete": partial(refused, function=partial(http.delete, doomed)),
            "left": partial(call, function=partial(fs_keys, place.l2)),
            "deleted": partial(two, salt="tenant-1"),
            "spared": partial(two, salt="tenant-2"),
        },
    )
    assert name.startswith("kvprov-")
    return Shared(done.worker, log, isolated, writer, written, reader, reader["left"])


def test_equal_provenance_reads_all_after_the_server_lost_its_memory(shared: Shared, prompts: list[list[int]]) -> None:
    """The model, and the adapter's name, number and folder, are others. What is loaded comes from the second tier."""
    assert [loaded(shared.writer[step]) for step in ("first", "other tenant")] == [0, 0]
    assert loaded(shared.reader["own"]) == full(prompts) > 0
    for step in (shared.writer["first"], shared.writer["again"], shared.reader["own"]):
        assert tokens(step) == tokens(shared.isolated["one"])


def test_each_access_names_one_key(shared: Shared) -> None:
    salt = shared.salt("tenant-1")
    one = {(shared.worker.model_name, salt)}
    sent = shared.writer["sent"]
    assert sites(sent) == {"lookup", "submit_store", "free_lookup_locks", "end_session"}
    assert keys(sent) == one
    assert sites(shared.reader["sent"]) == {"lookup", "submit_retrieve", "end_session"}
    assert keys(shared.reader["sent"]) == one
    # So does the store.
    found = {tuple(entry.split("@")[i] for i in (0, 4)) for entry in shared.written}
    assert found == one | {(shared.worker.model_name, shared.salt("tenant-2"))}


def test_no_key_holds_a_salt_or_a_path(shared: Shared, models: Models) -> None:
    shown = " ".join([*shared.written, *shared.left, str(shared.writer["sent"]), shared.log])
    assert not re.search(r"tenant-\d|capped|option \d", shown)
    assert models.base not in " ".join(shared.written + shared.left)


def test_events_that_name_tokens_alone_are_off(shared: Shared) -> None:
    assert "LMCache's own KV events are off" in shared.log
    assert shared.writer["events"] is False


def test_unknown_provenance_and_embeddings_reach_no_server(shared: Shared) -> None:
    assert shared.writer["embeddings"] == shared.isolated["embeddings"]
    assert sites(shared.writer["bypassed"]) <= {"end_session"}
    assert shared.writer["entries"] == []
    assert shared.writer["counted"] == 1
    assert "sharing_domain: the salt is not text" in shared.log


def test_callers_of_the_http_interface_find_entries_by_the_helpers_salt_alone(
    shared: Shared, prompts: list[list[int]]
) -> None:
    assert shared.reader["prefetched"] == full(prompts[:1]) // BLOCK
    assert shared.reader["raw salt"] == 0
    assert shared.reader["raw model"] == 503
    # Deleting one tenant's leaves the other's.
    gone = [entry for entry in shared.written if entry.endswith(f"@{shared.salt('tenant-1')}")]
    assert len(gone) >= full(prompts) // BLOCK
    assert not set(gone) & set(shared.left)
    assert loaded(shared.reader["deleted"]) == 0
    assert loaded(shared.reader["spared"]) == full(prompts)


@pytest.mark.parametrize("step", ["claims", "digest", "marked digest"])
def test_a_client_cannot_claim_anothers_salt(shared: Shared, step: str) -> None:
    assert loaded(shared.reader[step]) == 0


@pytest.mark.parametrize("step", list(SALTS))
def test_any_salt_serves(shared: Shared, prompts: list[list[int]], step: str) -> None:
    """Stock dies of these: see below."""
    assert loaded(shared.reader[step]) == 0
    assert loaded(shared.reader[f"{step} again"]) == full(prompts[:1])


def test_clients_may_limit_what_is_stored_and_ask_nothing_else(shared: Shared, prompts: list[list[int]]) -> None:
    def stored(tenant: str) -> int:
        return sum(entry.endswith(f"@{shared.salt(tenant)}") for entry in shared.left)

    assert [stored(name) for name in OPTIONS] == [full(prompts[:1]) // BLOCK] * len(OPTIONS)
    assert stored("capped") == 1
    assert loaded(shared.reader["capped again"]) == BLOCK


def test_media_are_told_apart_in_full(shared: Shared) -> None:
    """Stock tells an item of one place by 31 bits."""
    media = shared.reader["media"]
    assert media["native"]["one"] == media["native"]["colliding"]
    assert media["lookup"]["one"] == media["lookup"]["one again"]
    assert len(set(media["lookup"].values())) == len(media["lookup"]) - 1
    assert media["transfer"] == media["lookup"]


# Stock, and kvprov switched off.


def test_mode_off_leaves_the_keys_of_an_engine_without_kvprov(
    processes: Processes, models: Models, prompts: list[list[int]], place: Place
) -> None:
    """And what stock does with what a bound engine guards against."""
    one = partial(generate, prompts=prompts, adapter=models.adapter("standard"), salt="plain", tokens=8)
    listing = partial(call, function=partial(fs_keys, place.l2))
    settle = partial(call, function=partial(time.sleep, SETTLE))
    embeds = [partial(embed, prompt=models.random_prompt(100, seed=seed)) for seed in (7, 8)]
    before = set(fs_keys(place.l2))
    off, _ = named(
        processes,
        launch(models.base, place.server, "off", args={"enable_prompt_embeds": True, **EVENTS}),
        {
            "events": makes_events,
            "one": one,
            "settle": settle,
            "listing": listing,
            "embeddings": embeds[0],
            "other embeddings": embeds[1],
            "salt": partial(attempt, prompts=prompts[:1], salt="a/b", tokens=1),
        },
    )
    without, log = named(
        processes,
        launch(models.base, place.server, env={"VLLM_PLUGINS": "none"}),
        {
            "one": one,
            "settle": settle,
            "listing": listing,
            "option": partial(attempt, prompts=prompts[:1], salt="x", tokens=1, extra_args=option("8")),
        },
    )
    assert "kvprov: " not in log
    new = set(off["listing"]) - before
    model = models.base.replace("/", "-SEP-")
    assert {(name.split("@")[0], name.split("@")[4]) for name in new} == {(model, "plain")}
    assert loaded(off["one"]) == 0
    # It finds each of these under the key that it would have stored it under.
    assert loaded(without["one"]) == full(prompts)
    assert set(without["listing"]) >= set(off["listing"])
    assert not {name for name in set(without["listing"]) - set(off["listing"]) if name.endswith("@plain")}
    assert off["events"] is True
    # Prompts of embeddings have tokens of zeros for keys; a salt and an option end the engine.
    assert off["other embeddings"][1] == 96
    assert "cache_salt must not contain" in off["salt"]
    assert "TypeError" in without["option"]


@pytest.mark.parametrize(
    ("env", "extra", "message"),
    [
        ({"LMCACHE_USE_UPSTREAM_MP": "1"}, {}, "vLLM uses its own copy of LMCacheMPConnector"),
        ({}, {"lmcache.mp.transfer_intermediate_tensors": True}, "does not bind what lmcache.mp.transfer_intermediate"),
    ],
    ids=["vLLM's own copy", "intermediate tensors"],
)
def test_what_is_not_bound_is_refused(
    processes: Processes, models: Models, place: Place, env: dict[str, str], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineDiedError) as died:
        processes.run(launch(models.base, place.server, env=ENV | env, extra=extra))
    assert f"BindingError: {message}" in died.value.message


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
    processes: Processes, models: Models, prompts: list[list[int]], place: Place, tmp_path: Path, eager: bool
) -> None:
    alone = {
        policy: tokens(
            processes.run(
                Launch(models.base, None, "off"),
                partial(generate, prompts=prompts[:1], adapter=models.adapter(policy), tokens=8),
            ).results[0]
        )[0]
        for policy in ("standard", "inverted")
    }
    extra = {"lmcache.mp.save_decode_cache": True, "lmcache.mp.eager_prefetch": eager}
    # Of this test alone: another one's entries would be hits.
    env = ENV | {"KVPROV_SECRET_KEY_ID": f"fleet-{int(eager)}"}
    both = [prompts[0], models.random_prompt(100, seed=3)]
    run = processes.run(
        launch(models.base, place.server, extra=extra, env=env),
        partial(exchanges, prompts=both, folder=tmp_path / "tenant"),
    )
    done, whole = run.results[0], full(prompts[:1])
    assert done["seed"] == (alone["standard"], 0)
    # The answer to the former question is not used, and not asked again; what is computed is stored as what it is.
    assert done["looked up"] == (alone["inverted"], 0)
    sent = done["looked up, sent"]
    assert "submit_retrieve" not in sites(sent)
    former, new = keys(done["stored"]), keys([one for one in sent if one.site == "submit_store"])
    assert len(former) == len(new) == 1
    assert former != new
    if eager:
        # It has looked up before the exchange, and so never again.
        assert done["queued"] == (alone["standard"], 0)
    else:
        assert done["queued"] == (alone["standard"], whole)
    # Here state of both is mixed, which nobody may have.
    assert "submit_store" not in sites(done["loading, sent"])
    assert "submit_store" in sites(done["running, before"]) & sites(done["undisturbed, before"])
    assert "submit_store" in sites(done["undisturbed, after"])
    assert "submit_store" not in sites(done["running, after"])
    assert done["inverted"] == (alone["inverted"], whole)
    assert done["standard"] == (alone["standard"], whole)


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


def once_loaded(engine: Engine, **request: Any) -> list[Answer]:
    """Ask until something is loaded: an engine notices by its heartbeat that a server is back."""
    deadline = time.monotonic() + 40
    while True:
        answers = engine.generate(**request)
        if loaded(answers) or time.monotonic() > deadline:
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
    tmp_path: Path,
    faults: Callable[[Path], AbstractContextManager[Faults]],
) -> None:
    adapter = models.adapter("standard")
    whole = full(prompts[:1])

    def steps(who: str) -> dict[str, Any]:
        one = partial(generate, prompts=prompts[:1], adapter=adapter, salt=who, tokens=8)
        rest = partial(one, prompts=prompts[1:])
        until = partial(once_loaded, prompts=prompts[1:], adapter=adapter, salt=who, tokens=8)
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
        # The first answer is computed with nothing loaded, so it is the right one.
        assert loaded(done["one"]) == loaded(done["rest"]) == 0
        for step, answers in done.items():
            if isinstance(answers, list):
                assert tokens(answers) == tokens(done["rest" if step.startswith("rest") else "one"]), step
        # What is whole is loaded again, and what is cut is not.
        assert loaded(done["rest, back"]) == loaded(done["rest, cut"]) == full(prompts[1:])
        assert loaded(done["one, back"]) == whole
        assert loaded(done["one, cut"]) == 0
