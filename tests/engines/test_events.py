"""KV events of a bound engine in a process of its own, followed over zmq by one that imports no vLLM."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvprov.contract.key import DigestBits
from kvprov.errors import ContractError, EventError
from kvprov.events import BlockHasher, digest_text, external, tagged
from kvprov.identity.adapter import identify_adapter
from kvprov.identity.domain import load_secret, sharing_domain
from tests.support.engine import Engine, Launch
from tests.support.inputs import Ask, made
from tests.support.models import BLOCK, Models
from tests.support.processes import Processes
from tests.support.steps import call, generate, loaded

SALT = "a-salt-that-must-not-show"
NAME = "an-adapter-by-name"
SECRET = "a secret of sixteen bytes and more"
TOKENS = 40


@contextmanager
def subscribed(endpoint: str) -> Iterator[list[bytes]]:
    """Collect what is published until the block ends, and a moment more."""
    batches: list[bytes] = []
    stop = False

    def receive(socket: zmq.Socket[bytes]) -> None:
        while not stop or socket.poll(200):
            if socket.poll(100):
                batches.append(socket.recv_multipart()[-1])

    with zmq.Context() as context, closing(context.socket(zmq.SUB)) as socket, ThreadPoolExecutor(1) as pool:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        receiving = pool.submit(receive, socket)
        try:
            yield batches
        finally:
            stop = True
            receiving.result()


def keys_of_media(engine: Engine, *, tokens: tuple[int, ...], seeds: tuple[int, int]) -> tuple[list[Any], list[bytes]]:
    """Return what an event would show of a request with two images in its first block, and its hashes."""
    from vllm.v1.core import kv_cache_utils

    request = made(engine, "media", Ask(tokens, (("chosen", seeds[0], 3), ("chosen", seeds[1], 13))))
    keys = [
        kv_cache_utils.generate_block_hash_extra_keys(request, start, start + BLOCK, 0)[0]
        for start in range(0, len(request.block_hashes) * BLOCK, BLOCK)
    ]
    shown = msgspec.msgpack.decode(msgspec.msgpack.encode(kv_cache_utils.to_event_extra_keys(keys)))
    return shown, [bytes(block) for block in request.block_hashes]


@dataclass
class Followed:
    """What one engine published, and what it was asked."""

    algorithm: str
    bits: DigestBits
    stored: list[dict[str, Any]]
    payload: bytes
    log: str
    media: list[tuple[list[Any], list[bytes]]]
    loaded: list[int]


MEDIA = (*range(5, 5 + BLOCK), *range(BLOCK))


@pytest.fixture(scope="module")
def prompt(models: Models) -> list[int]:
    return models.prompts(1)[0]


@pytest.fixture(scope="module", params=["sha256", "sha256_cbor"])
def followed(
    request: pytest.FixtureRequest,
    processes: Processes,
    models: Models,
    prompt: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Followed:
    algorithm: str = request.param
    folder = tmp_path_factory.mktemp("events")
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    # Hashes are shown by their low 64 bits, vLLM's default, and in whole.
    short = algorithm == "sha256"
    bits = DigestBits.FULL if short else DigestBits.SHORT
    env = {"KVPROV_SECRET_FILE": str(folder / "secret"), "KVPROV_DIGEST_BITS": str(int(bits))}
    # ipc paths have 107 characters at most.
    endpoint = f"ipc://@kvprov-{folder.name}-{time.time_ns()}"
    launch = Launch(
        models.base,
        folder / "blocks",
        env=env | ({} if short else {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}),
        args={
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": algorithm,
            "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint},
        },
        connector={
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "tests.support.host_offload",
                "cpu_bytes_to_use": 32 << 20,
                "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "blocks")}],
            },
        },
    )
    adapter = replace(models.adapter("standard"), name=NAME)
    ask = partial(generate, prompts=[prompt], tokens=TOKENS)
    with subscribed(endpoint) as batches:
        run = processes.run(
            launch,
            partial(call, function=partial(time.sleep, 0.5)),
            ask,
            partial(ask, salt=SALT),
            partial(ask, adapter=adapter, salt=SALT),
            partial(ask, adapter=adapter, salt=SALT),
            partial(keys_of_media, tokens=MEDIA, seeds=(1, 2)),
            partial(keys_of_media, tokens=MEDIA, seeds=(1, 1)),
            partial(call, function=partial(time.sleep, 0.5)),
        )
    events = [event for batch in batches for event in msgspec.msgpack.decode(batch)[1]]
    return Followed(
        algorithm,
        bits,
        [event for event in events if event["type"] == "BlockStored"],
        b"".join(batches),
        run.log,
        run.results[5:7],
        [loaded(answers) for answers in run.results[1:5]],
    )


@pytest.mark.engine
def test_a_subscriber_recomputes_every_hash(followed: Followed, prompt: list[int]) -> None:
    hasher = BlockHasher(followed.algorithm)
    known: dict[bytes | int, bytes] = {}
    own = [event for event in followed.stored if event["medium"] == "GPU"]
    blocks = [block for event in own for block in hasher.stored(event, known)]
    # Three provenances; each stores the whole blocks of its prompt and of what it computed after it.
    assert len(set(blocks)) == 3 * ((len(prompt) + TOKENS - 1) // BLOCK)
    assert followed.loaded == [0, 0, 0, len(prompt) // BLOCK * BLOCK]
    kinds = {type(shown) for event in own for shown in event["block_hashes"]}
    assert kinds == {int if followed.algorithm == "sha256" else bytes}
    # One token, or the digest, changed in what an event says: it is noticed.
    first = next(event for event in own if event["parent_block_hash"] is None)
    text = first["extra_keys"][0][0]
    for changed in (
        {"token_ids": [first["token_ids"][0] + 1, *first["token_ids"][1:]]},
        {"extra_keys": [[text[::-1]], *first["extra_keys"][1:]]},
        {"extra_keys": None},
    ):
        with pytest.raises(EventError, match="not what its event says"):
            hasher.stored(first | changed, {})
    with pytest.raises(EventError, match="parent was not seen"):
        hasher.stored(first | {"parent_block_hash": 5}, {})


@pytest.mark.engine
def test_the_tiers_events_carry_bound_hashes(followed: Followed, prompt: list[int]) -> None:
    """Events of the tier in host memory show no tokens: they are matched by hash."""
    own = {shown for event in followed.stored if event["medium"] == "GPU" for shown in event["block_hashes"]}
    tier = {shown for event in followed.stored if event["medium"] != "GPU" for shown in event["block_hashes"]}
    assert {event["medium"] for event in followed.stored} >= {"GPU", "CPU"}
    assert len(tier) >= 3 * (len(prompt) // BLOCK)
    assert tier <= own


@pytest.mark.engine
def test_a_router_knows_the_hashes_before_it_routes(followed: Followed, models: Models, prompt: list[int]) -> None:
    """From what the engine announced when it started, and what the router knows of the request."""
    dimensions = ("kv_representation", "model_config", "precision", "weights")
    announced = dict(re.findall(rf"kvprov: ({'|'.join(dimensions)})=(\S+)", followed.log))
    assert sorted(announced) == sorted(dimensions)
    secret = load_secret(file=None, value=SECRET, key_id=None)
    salt = sharing_domain(SALT, secret).identity
    adapter = identify_adapter(Path(models.adapter("standard").path)).identity
    requests: list[dict[str, str]] = [{"adapter": adapter, "sharing_domain": salt}, {"sharing_domain": salt}, {}]
    hasher = BlockHasher(followed.algorithm)
    seen = {shown for event in followed.stored for shown in event["block_hashes"]}
    show = external if followed.algorithm == "sha256" else bytes
    found = []
    for asked in requests:
        text = digest_text(announced, asked, bits=followed.bits)
        blocks = hasher.prompt(prompt, BLOCK, text)
        assert len(blocks) == len(prompt) // BLOCK
        assert {show(block) for block in blocks} <= seen
        found.extend(blocks)
    assert len(set(found)) == 3 * (len(prompt) // BLOCK)
    for other in ({"adapter": salt}, {"sharing_domain": adapter}):
        text = digest_text(announced, other, bits=followed.bits)
        assert show(hasher.prompt(prompt, BLOCK, text)[0]) not in seen


@pytest.mark.engine
def test_events_show_no_salt_and_no_path(followed: Followed, models: Models) -> None:
    assert SALT.encode() not in followed.payload
    assert models.adapter("standard").path.encode() not in followed.payload
    assert models.base.encode() not in followed.payload
    # The adapter's name is in one place, for routers, and not in what hashes are made of.
    assert NAME.encode() in followed.payload
    nameless = [{key: value for key, value in event.items() if key != "lora_name"} for event in followed.stored]
    assert NAME not in repr(nameless)
    assert {event["lora_name"] for event in followed.stored} == {NAME, None}


@pytest.mark.engine
def test_hashes_with_media_are_recomputed_too(followed: Followed) -> None:
    """Also where one image comes twice in a block: a pickle could tell one text from two equal ones."""
    hasher = BlockHasher(followed.algorithm)
    chains = []
    for shown, blocks in followed.media:
        assert len(shown[0]) == 3
        assert [key[1] for key in shown[0][1:]] == [3, 13]
        parent: bytes | None = None
        for index, block in enumerate(blocks):
            parent = hasher.block(parent, MEDIA[index * BLOCK : (index + 1) * BLOCK], shown[index])
            assert parent == block
        chains.append(blocks)
    (two, _), (one, _) = followed.media
    assert two[0][1][0] != two[0][2][0]
    assert one[0][1][0] == one[0][2][0]
    assert not set(chains[0]) & set(chains[1])


def test_keys_of_an_unbound_engine_are_refused() -> None:
    for key in ("a-salt", "adapter", 5, ["x"], [1, 2], {"a": 1}):
        with pytest.raises(EventError, match="no bound engine publishes"):
            tagged([key])
    assert tagged(None) is None
    assert tagged([]) is None
    text = "A" * 43
    assert tagged([text, ["i", -3], b"e"]) == (("kvprov", text), ("mm", "i", -3), ("prompt_embeds", b"e"))


def test_only_hashes_that_may_stand_in_keys_are_computed() -> None:
    with pytest.raises(EventError, match="xxhash"):
        BlockHasher("xxhash")
    assert BlockHasher(seed="0").root != BlockHasher().root != BlockHasher("sha256_cbor").root


def test_a_digest_has_the_registrys_dimensions() -> None:
    worker = dict.fromkeys(("kv_representation", "model_config", "precision", "weights"), "x:y")
    assert len(digest_text(worker)) == 43
    assert digest_text(worker)[:21] == digest_text(worker, bits=DigestBits.SHORT)[:21]
    for wrong in (dict(list(worker.items())[1:]), worker | {"colour": "x:y"}):
        with pytest.raises(ContractError):
            digest_text(wrong)
    with pytest.raises(ContractError):
        digest_text(worker, {"colour": "x:y"})


def test_canonical_cbor_is_that_of_the_library() -> None:
    cbor2 = pytest.importorskip("cbor2")
    from kvprov.events import _cbor

    numbers = [n + d for n in (0, 24, 256, 65536, 2**32) for d in (-1, 0, 1)]
    values = [None, b"", b"x" * 300, "", "é" * 30, (), tuple(range(700)), *numbers, *(-n for n in numbers)]
    values.append((b"p" * 32, tuple(numbers), (("kvprov", "A" * 43), ("mm", "i", -3)), None))
    for value in values:
        assert _cbor(value) == cbor2.dumps(value, canonical=True)
