"""Keys of LMCache's in-process form, against LMCache's own serializer, parser and token database. No engine runs."""

from __future__ import annotations

import hashlib
import itertools
import struct
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE, CacheEngineKey
from lmcache.v1 import config as lmcache_config
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import MAX_KEY_LENGTH, ClientCommand, ClientMetaMessage
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvprov.contract.key import DigestBits, key_text
from kvprov.engines.lmcache import forms, keys
from kvprov.engines.lmcache.tokens import BoundTokenDatabase
from kvprov.errors import BindingError

FACTS = keys.PathFacts(1, 1, (1, 1), 32, 2, 8, 128, "naive")
TEXT = key_text(bytes(range(32)))
TOKENS = list(range(1, 101))
HOSTILE = ("m" * 4000, "m" * 140 + "é" * 9, "org/model@rev", "a%b@1@2@ff@half", "", "\udc80")
"""Model paths as an operator or a hub may have them, and worse."""


def database(model: str = "org/model", world: int = 1, worker: int = 0, dtype: str = "bfloat16", **config: Any) -> Any:
    """Return LMCache's own token database, which has not been started: that would touch vLLM."""
    native = ChunkedTokenDatabase.__new__(ChunkedTokenDatabase)
    native.metadata = SimpleNamespace(
        model_name=model, world_size=world, worker_id=worker, kv_dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype]
    )
    native.config = SimpleNamespace(save_unfull_chunk=False, **config)
    native.chunk_size, native.save_only_first_rank, native.hash_func = 32, False, hash
    return native


def made(db: Any, text: str = TEXT, tokens: list[int] = TOKENS) -> list[CacheEngineKey]:
    found = db.process_tokens(tokens=tokens, request_configs=keys.request_configs(text, False))
    return [key for _, _, key in found]


def sent(key: CacheEngineKey) -> CacheEngineKey:
    """Return what LMCache's server reads of a message that names `key`."""
    message = ClientMetaMessage(ClientCommand.EXIST, key, 0, MemoryFormat(1), torch.float16, torch.Size([0, 0, 0, 0]))
    data = message.serialize()
    assert len(data) == ClientMetaMessage.packlength()
    received: CacheEngineKey = ClientMetaMessage.deserialize(data).key
    return received


# Lengths, the serializer and the parser.


@pytest.mark.parametrize("model", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("bits", list(DigestBits))
def test_keys_fit_the_wire_and_come_back_whatever_the_model_is_called(model: str, bits: DigestBits) -> None:
    text = key_text(bytes([255] * 32), bits)
    for dtype, world in itertools.product(sorted(STR_DTYPE_TO_TORCH_DTYPE), (1, 8, 4096, 999_999)):
        db = BoundTokenDatabase(database(model, world, world - 1, dtype), FACTS)
        for key in made(db, text):
            data = key.to_string().encode()
            assert len(data) <= keys.longest_key(world, dtype, len(text)) <= MAX_KEY_LENGTH == keys.WIRE_BYTES
            assert data.isascii()
            assert sent(key) == key
            assert CacheEngineKey.from_string(key.to_string()) == key
            assert sent(key).to_string() == key.to_string()


def test_stock_keys_do_neither() -> None:
    """What the test above is about."""
    with pytest.raises(AssertionError, match="exceeds maximum"):
        sent(stock(HOSTILE[0]))
    # LMCache counts characters, not bytes: this one passes, and its end is cut off.
    name = "m" * 98 + "é" * 20
    assert len(stock(name).to_string()) <= MAX_KEY_LENGTH < len(stock(name).to_string().encode())
    with pytest.raises(ValueError, match="Invalid key string"):
        sent(stock(name))
    with pytest.raises(ValueError, match="Invalid key string"):
        CacheEngineKey.from_string(stock("org/model@rev").to_string())


def stock(model: str) -> CacheEngineKey:
    return CacheEngineKey(model, 1, 0, 0x1234567890ABCDEF, torch.bfloat16, {})


@pytest.mark.parametrize(("bits", "length"), [(DigestBits.FULL, 135), (DigestBits.SHORT, 114)])
def test_the_usual_key_has_the_length_that_the_docs_state(bits: DigestBits, length: int) -> None:
    text = key_text(bytes(range(32)), bits)
    assert keys.longest_key(1, "bfloat16", len(text)) == length
    assert keys.TEXT_LENGTHS[bits] == len(text)


def test_a_hash_with_leading_zeros_comes_back() -> None:
    for value in (0, 1, 2**255, 2**256 - 1):
        key = CacheEngineKey(keys.MODEL_NAME, 1, 0, value, torch.bfloat16, keys.request_configs(TEXT, False))
        assert sent(key) == key


def test_only_worlds_of_millions_of_workers_exceed_the_wire() -> None:
    widest = max(STR_DTYPE_TO_TORCH_DTYPE, key=len)
    assert keys.longest_key(1_000_000, widest, 43) <= keys.WIRE_BYTES < keys.longest_key(10_000_000, widest, 43)


# What keys are made of.


def test_hashes_are_the_same_on_every_machine() -> None:
    """Computed here from the specification: neither the process's hash seed nor its byte order enters."""
    facts = (
        '{"context_parallel":[1,1],"head_size":128,"heads":8,"layers":32,"pipeline_parallel":1,"planes":2,'
        '"serde":"naive","tensor_parallel":1}'
    )

    def digest(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    def lp(text: str | bytes) -> bytes:
        data = text if isinstance(text, bytes) else text.encode()
        return struct.pack(">Q", len(data)) + data

    state, expected = digest(lp("kv-lmcache-tokens/1")), []
    for start in (0, 32, 64):
        state = digest(state, struct.pack(">32q", *TOKENS[start : start + 32]))
        expected.append(digest(lp("kv-lmcache-chunk/1"), lp(facts), lp(TEXT), lp(state)).hex())
    assert [f"{key.chunk_hash:064x}" for key in made(BoundTokenDatabase(database(), FACTS))] == expected
    assert expected[0] == "9dbe707021378dfde8c32b2a425486db003cd7d7ab600812955dc354ea73e602"


def test_hashes_go_from_the_scheduler_to_the_workers_by_message() -> None:
    """They are wider than a whole number in LMCache's messages."""
    scheduler, worker = (BoundTokenDatabase(database(), FACTS) for _ in range(2))
    chunks = list(scheduler.process_tokens(tokens=TOKENS, make_key=False))
    encoded = msgspec.msgpack.encode([[value for _, _, value in chunks], [end - start for start, end, _ in chunks]])
    hashes, offsets = msgspec.msgpack.decode(encoded)
    configs = keys.request_configs(TEXT, False)
    found = worker.process_tokens(hashes=hashes, offsets=offsets, request_configs=configs)
    assert [key for _, _, key in found] == made(worker)
    assert len(made(worker)) == 3
    with pytest.raises(OverflowError):
        msgspec.msgpack.encode(made(worker)[0].chunk_hash)


OTHER_FACTS = [
    replace(FACTS, **{field.name: (2, 1) if field.name == "context_parallel" else "cachegen"})
    if field.name in ("context_parallel", "serde")
    else replace(FACTS, **{field.name: getattr(FACTS, field.name) + 1})
    for field in fields(FACTS)
]


def test_each_path_fact_tokens_and_text_make_another_hash() -> None:
    """By the hash alone, since some of LMCache's backends and its events look at nothing else."""
    base = made(BoundTokenDatabase(database(), FACTS))
    assert made(BoundTokenDatabase(database("another/name"), replace(FACTS))) == base
    others = [made(BoundTokenDatabase(database(), facts)) for facts in OTHER_FACTS]
    others += [made(BoundTokenDatabase(database(), FACTS), text=key_text(bytes(32)))]
    others += [made(BoundTokenDatabase(database(), FACTS), tokens=[0, *TOKENS[1:]])]
    hashes = {key.chunk_hash for found in (base, *others) for key in found}
    assert len(others) == len(fields(FACTS)) + 2
    assert len(hashes) == 3 * (len(others) + 1)
    later = made(BoundTokenDatabase(database(), FACTS), tokens=[*TOKENS[:95], 0])
    assert [a == b for a, b in zip(base, later, strict=True)] == [True, True, False]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.lists(st.integers(0, 2**31 - 1), max_size=40))
def test_no_two_chunks_have_one_hash(first: list[int], second: list[int]) -> None:
    assert (keys.chain(keys.chain_start(), first) == keys.chain(keys.chain_start(), second)) == (first == second)


def test_no_two_keys_alias_where_a_store_maps_characters() -> None:
    """LMCache's backends map `/`, `@` or others to one character, and file systems may ignore case."""
    texts = [key_text(bytes([i]) * 32) for i in range(40)]
    db = BoundTokenDatabase(database(), FACTS)
    found = [key.to_string() for text in texts for key in made(db, text)]
    coarse = {"".join(c if c in "0123456789abcdef" else "_" for c in key.lower()) for key in found}
    assert len(coarse) == len(found) == 120
    for key in found:
        assert "/" not in key
        assert key.count("@") == 5
        assert key.count("%") == 1


# Whoever names no provenance gets no key.


@pytest.mark.parametrize(
    "configs",
    [
        None,
        {},
        {"lmcache.skip_save": True},
        {"lmcache.tag.user": "x"},
        {"lmcache.tag.kvprov": ""},
        {"lmcache.tag.kvprov": 5},
        {"lmcache.tag.kvprov": TEXT, "lmcache.tag.user": "x"},
    ],
    ids=repr,
)
def test_no_key_is_made_without_provenance(configs: dict[str, Any] | None) -> None:
    db = BoundTokenDatabase(database(), FACTS)
    with pytest.raises(BindingError, match="without provenance"):
        list(db.process_tokens(tokens=TOKENS, request_configs=configs))


def test_no_key_is_made_of_a_narrow_hash() -> None:
    """As LMCache's offload server is sent them."""
    db = BoundTokenDatabase(database(), FACTS)
    with pytest.raises(BindingError, match="without provenance"):
        list(db.process_tokens(hashes=[1234], offsets=[32], request_configs=keys.request_configs(TEXT, False)))


# What a client may say.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["lmcache.tag.kvprov", "lmcache.tag.", "lmcache.tag.a@b%c", "lmcache.skip_save", "x"])


@given(st.one_of(JSON, st.dictionaries(st.just("kv_transfer_params"), st.dictionaries(NAMES, JSON) | JSON)))
def test_nothing_that_a_client_sends_reaches_a_key(extra_args: Any) -> None:
    said = keys.client_parameters(extra_args)
    configs = keys.request_configs(TEXT, said.skip_save)
    assert keys.text_of(configs) == TEXT
    assert set(configs) <= {"lmcache.tag.kvprov", "lmcache.skip_save"}
    assert all(isinstance(value, str) for value in said.tags.values())


def test_a_client_cannot_forge_or_strip_the_tag() -> None:
    said = keys.client_parameters({"kv_transfer_params": {"lmcache.tag.kvprov": "forged", "disagg_spec": {}}})
    assert said.tags == {"kvprov": "forged"}
    assert keys.request_configs(TEXT, said.skip_save) == {"lmcache.tag.kvprov": TEXT}


@pytest.mark.parametrize("value", [5, None, ["x"], {"a": 1}, True])
def test_a_tag_that_is_no_text_is_a_problem(value: object) -> None:
    said = keys.client_parameters({"kv_transfer_params": {"lmcache.tag.user": value}})
    assert "no text" in said.problem
    assert said.tags == {}


@pytest.mark.parametrize(("value", "skips"), [(True, True), (False, False), (1, False), ("true", False), (None, False)])
def test_a_client_may_ask_not_to_store(value: object, skips: bool) -> None:
    assert keys.client_parameters({"kv_transfer_params": {"lmcache.skip_save": value}}).skip_save is skips


# Media.


def test_media_enter_at_full_strength() -> None:
    media = [("image-1", 4, 20), ("image-2", 30, 20)]
    same = keys.tag_text(TEXT, list(media))
    others = [
        keys.tag_text(TEXT, other)
        for other in (
            [],
            media[:1],
            media[::-1],
            [("image-3", 4, 20), media[1]],
            [("image-1", 5, 20), media[1]],
            [("image-1", 4, 21), media[1]],
            [("\udc80", 4, 20)],
        )
    ]
    assert keys.tag_text(TEXT, []) == TEXT
    assert same == keys.tag_text(TEXT, media)
    assert len({same, *others}) == 8
    assert {len(text) for text in (same, *others)} == {43}
    assert len(keys.tag_text(TEXT[:22], media)) == 22
    assert keys.tag_text(key_text(bytes(32)), media) != same


# Forms.


def test_lmcaches_defaults_are_bound_and_its_settings_are_known() -> None:
    config = LMCacheEngineConfig.from_defaults()
    forms.check(config)
    assert set(forms.REFUSED) <= set(lmcache_config._CONFIG_DEFINITIONS)


@pytest.mark.parametrize("name", sorted(forms.REFUSED))
def test_a_form_that_drops_tags_is_refused(name: str) -> None:
    config = LMCacheEngineConfig.from_defaults()
    setattr(config, name, ["x"] if name == "storage_plugins" else "x")
    with pytest.raises(BindingError, match=name) as caught:
        forms.check(config)
    assert f"Leave {name} out" in caught.value.advice
    assert forms.REFUSED[name] in caught.value.message


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"remote_url": "lm://127.0.0.1:1"}, ""),
        ({"remote_url": "redis://127.0.0.1:1"}, ""),
        ({"remote_url": "external://host:0/?module"}, "remote_url"),
        ({"remote_url": "bigtable://x"}, "remote_url"),
        ({"remote_url": "plugin://x"}, "remote_url"),
        ({"remote_storage_plugins": ["redis", "fs.cold"]}, ""),
        ({"remote_storage_plugins": ["mine"]}, "remote_storage_plugins"),
        (
            {
                "remote_storage_plugins": ["redis"],
                "extra_config": {"remote_storage_plugin.redis.module_path": "somebody.elses"},
            },
            "remote_storage_plugins",
        ),
        ({"extra_config": {"enable_nixl_storage": True}}, "extra_config.enable_nixl_storage"),
    ],
    ids=repr,
)
def test_stores_whose_names_are_not_known_are_refused(settings: dict[str, Any], refused: str) -> None:
    config = LMCacheEngineConfig.from_defaults()
    for name, value in settings.items():
        setattr(config, name, value)
    assert [name for name, _ in forms.problems(config)] == ([refused] if refused else [])


def test_a_release_without_a_setting_that_is_checked_is_refused() -> None:
    with pytest.raises(BindingError, match="no setting use_layerwise") as caught:
        forms.check(SimpleNamespace())
    assert "kvprov[lmcache]" in caught.value.advice
