"""LMCacheMPConnector against real LMCache servers: one key at each access, and none of anybody else's.

That every dimension separates, and equal provenance shares, is tested for all tiers alike; here is what is special.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprov.engines.lmcache.http import Announced, announced, prefetch_body, request_salt
from kvprov.identity.domain import FleetSecret
from tests.support import lmcache_mp_steps
from tests.support.engine import Engine, Launch
from tests.support.lmcache_mp import encoded, fs_keys, fs_l2, lmcache_server
from tests.support.lmcache_mp_steps import (
    ENV,
    SETTLE,
    Place,
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
from tests.support.processes import EngineDiedError, Processes
from tests.support.steps import bypassed, call, generate, loaded, tokens

pytestmark = pytest.mark.engine

SECRET = FleetSecret(lmcache_mp_steps.SECRET.encode(), "fleet")
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


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
    with place_in(tmp_path_factory.mktemp("lmcache")) as place:
        yield place


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


def test_limits_go_by_the_digest_and_not_by_the_raw_salt(
    processes: Processes, models: Models, prompts: list[list[int]], shared: Shared, tmp_path: Path
) -> None:
    """What docs/lmcache.md says of quotas: whoever has none under the policy IsolatedLRU loses all."""
    l2 = tmp_path / "l2"
    l2.mkdir()
    isolated = fs_l2(l2) | {"eviction": {"eviction_policy": "IsolatedLRU"}}
    one = partial(generate, prompts=prompts, adapter=models.adapter("standard"), tokens=1)
    with lmcache_server(tmp_path, isolated) as server:
        for salt in (shared.salt("tenant-1"), "tenant-2"):
            server.http.call("PUT", f"/quota/{salt}", {"limit_gb": 1.0})
        settle = partial(call, function=partial(time.sleep, 2 * SETTLE))
        processes.run(launch(models.base, server), partial(one, salt="tenant-1"), partial(one, salt="tenant-2"), settle)
        kept = {entry.split("@")[4] for entry in fs_keys(l2)}
        used = server.http.call("GET", f"/quota/{shared.salt('tenant-1')}")["current_usage_gb"]
    assert kept == {shared.salt("tenant-1")}
    assert used > 0


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
    assert "BindingError: " in died.value.message
    assert message in died.value.message
