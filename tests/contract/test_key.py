from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract import DigestBits, Known, chain_entry, content_identifier, key_text, nonce
from tests.contract import reference

DIGESTS = st.binary(min_size=32, max_size=32)


@given(DIGESTS)
def test_text_is_unpadded_base64url(digest: bytes) -> None:
    whole, short = key_text(digest), key_text(digest, DigestBits.SHORT)
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", whole)
    assert re.fullmatch(r"[A-Za-z0-9_-]{22}", short)
    assert whole == reference.text(digest)
    assert short == reference.text(digest[:16])


@given(DIGESTS)
def test_the_short_text_repeats_21_characters_and_ends_in_the_last_two_bits(digest: bytes) -> None:
    whole, short = key_text(digest), key_text(digest, DigestBits.SHORT)
    assert whole[:21] == short[:21]
    assert short[21] in "AQgw", "two bits, then four zero bits"
    assert reference.BASE64URL.index(short[21]) == reference.BASE64URL.index(whole[21]) & 0b110000


@given(DIGESTS, DIGESTS)
def test_text_tells_digests_apart(one: bytes, other: bytes) -> None:
    assert (key_text(one) == key_text(other)) == (one == other)
    assert (key_text(one, DigestBits.SHORT) == key_text(other, DigestBits.SHORT)) == (one[:16] == other[:16])


@pytest.mark.parametrize("position", range(32))
def test_the_text_depends_on_every_byte_that_it_claims(position: int) -> None:
    changed = bytes(position == index for index in range(32))
    assert key_text(changed) != key_text(bytes(32))
    assert (key_text(changed, DigestBits.SHORT) != key_text(bytes(32), DigestBits.SHORT)) == (position < 16)


def test_the_forms_that_enter_native_keys() -> None:
    assert chain_entry("T") == ("kvprov", "T")
    assert content_identifier("T") == "kvprov:T"


def test_a_nonce_is_an_identity_of_128_bits() -> None:
    assert nonce(bytes(range(16))) == Known("nonce:000102030405060708090a0b0c0d0e0f")


@pytest.mark.parametrize("length", [0, 8, 15, 17, 32])
def test_a_nonce_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        nonce(bytes(length))
