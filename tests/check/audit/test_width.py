"""How many bits enter: from keys alone."""

from __future__ import annotations

import base64
import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.check.audit.width import colliding_bits, effective_bits


def hashes(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{index}".encode()).digest() for index in range(count)]


@given(st.text(), st.integers(1, 16))
def test_what_is_cut_from_a_hash_is_seen_at_once(seed: str, size: int) -> None:
    cut = [b"entry/" + one[:size].hex().encode() + b".bin" for one in hashes(200, repr(seed))]
    # Also where some meet by chance, as of two hundred keys of sixteen bits now and then two do.
    assert effective_bits(cut) == 8 * size
    assert effective_bits([one[:size] for one in hashes(200, repr(seed))]) == 8 * size


@pytest.mark.parametrize("bits", [4, 8, 12, 16])
def test_what_is_hashed_again_is_found_by_collisions(bits: int) -> None:
    source = random.SystemRandom()
    values = {n: source.randbytes(32) for n in range(2**bits)}
    assert effective_bits([values[source.randrange(2**bits)] for _ in range(4096)]) == bits


def test_nothing_narrow_is_seen_where_nothing_is() -> None:
    assert effective_bits([b"bfloat16", b"float16"]) is None
    assert effective_bits([b"model@bfloat16@1", b"model@half@1"]) is None
    assert effective_bits([b"a", b"a", b"a"]) == 0
    assert effective_bits(hashes(100)) == 256
    # Few keys: a word of a hash's form is one.
    assert effective_bits([b"m_1a2b3c4d5e6f_r0", b"m_0f1e2d3c4b5a_r0"]) == 48
    text = [base64.urlsafe_b64encode(one).rstrip(b"=") for one in hashes(100)]
    assert effective_bits(text) >= 250


def test_folders_that_repeat_a_hash_add_nothing() -> None:
    names = [one.hex()[:12] for one in hashes(100)]
    assert effective_bits([f"/{name[:3]}/{name[3:5]}/{name}.bin".encode() for name in names]) == 48


@given(st.integers(0, 63), st.integers(2, 5000))
def test_the_estimate_never_says_less_than_what_was_seen(bits: int, samples: int) -> None:
    distinct = min(samples, 2**bits)
    found = colliding_bits(samples, distinct)
    assert found == float("inf") if distinct >= samples else 2**found * 2 >= distinct
