"""Which keys a digest can be read from, and what is said of the others."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract.key import DigestBits, content_identifier, key_text
from kvprov.engines.lmcache.keys import MODEL_NAME, TAG
from kvprov.errors import LedgerError
from kvprov.ledger import resolve

DIGESTS = st.tuples(st.binary(min_size=32, max_size=32), st.sampled_from(DigestBits)).map(lambda d: key_text(*d))
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)
FOLDERS = st.sampled_from(["", "/data/store/", "./", "a@b/", "/x y/"])
LAYOUT = MODEL_NAME + "-" + base64.urlsafe_b64encode(bytes(16)).rstrip(b"=").decode()


@given(DIGESTS)
def test_a_digest_is_itself(text: str) -> None:
    assert resolve(f" {text}\n").text == text
    assert resolve(content_identifier(text)).text == text
    assert resolve(f"{content_identifier(text)};tp=1;medium@3").text == text


@given(DIGESTS, HASHES, FOLDERS, st.sampled_from(["", ".data", ".pt"]))
def test_keys_of_lmcache_within_the_engine(text: str, hashed: str, folder: str, ending: str) -> None:
    key = f"{MODEL_NAME}@2@1@{hashed}@bfloat16@{TAG}%{text}"
    found = resolve(f"{folder}{key}{ending}")
    assert found.text == text
    assert found.rest == f"{MODEL_NAME}@2@1@{hashed}@bfloat16"
    for part in ("metadata", "kv_bytes"):
        assert resolve(key + part).text == text


@given(DIGESTS, HASHES, FOLDERS)
def test_keys_of_lmcache_s_server(text: str, hashed: str, folder: str) -> None:
    for rank, ending in (("0x01000100", ".data"), ("01000100", "")):
        found = resolve(f"{folder}{LAYOUT}@{rank}@0@{hashed}@{text}{ending}")
        assert found.text == text
        assert found.rest == f"{LAYOUT}@{rank}@0@{hashed}"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("0" * 32, "ExampleConnector"),
        ("/store/" + "0a" * 16 + "/", "ExampleConnector"),
        ("0" * 64, "HF3FS"),
        ("/s/" + "0" * 32 + "/model.layers.0.self_attn.attn.safetensors", "ExampleConnector"),
        ("/s/kvprov-tp1-pp1-pcp1-dcp1_0123456789ab_r0/abc/de_g0/" + "0" * 64 + ".bin", "vLLM's hash chain"),
        ("0" * 64 + "_-models-tiny_0_1.bin", "SGLang's hash chain"),
        (f"{MODEL_NAME}-tp1@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{'0' * 64}", "MooncakeStoreConnector"),
        ("/models/tiny@1@0@" + "0" * 16 + "@bfloat16", "not bound"),
        ("-SEP-models-SEP-tiny@0x01000100@0@" + "0" * 64 + "@tenant-1.data", "not bound"),
        (f"{LAYOUT}@0x01000100@0@{'0' * 64}.data", "not bound"),
        ("", "neither"),
        ("standard", "neither"),
    ],
)
def test_keys_without_a_readable_digest_say_so(key: str, says: str) -> None:
    with pytest.raises(LedgerError, match=says) as caught:
        resolve(key)
    assert caught.value.advice


@given(st.text(alphabet=st.characters(), max_size=80) | st.text(alphabet="@%:/._kvpro0af-", max_size=60))
def test_any_text_is_resolved_or_refused(text: str) -> None:
    refusal = None
    try:
        found = resolve(text)
    except LedgerError as error:
        refusal = error
    else:
        assert len(found.text) in (22, 43)
    assert refusal is None or (refusal.message.isprintable() and refusal.advice)
