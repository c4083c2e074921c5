"""From a digest to the text that enters a connector's key."""

from __future__ import annotations

import base64
import enum
from typing import Final

from kvprov.contract.descriptor import Known

MARK: Final = "kvprov"
"""Stands before the digest in every bound key, so that no other extra key or identifier can equal it."""

NONCE_BYTES: Final = 16


class DigestBits(enum.IntEnum):
    """How much of the digest enters keys.

    Adapters come from tenants, who could grind colliding pairs at 128 bits: hence 256 is the default.
    """

    FULL = 256
    SHORT = 128


def key_text(digest: bytes, bits: DigestBits = DigestBits.FULL) -> str:
    """Return unpadded base64url: 43 characters of the whole digest, or 22 of its first 16 bytes.

    Args:
        digest: 32 bytes.
        bits: 256 or 128.
    """
    return base64.urlsafe_b64encode(digest[: bits // 8]).rstrip(b"=").decode("ascii")


def chain_entry(text: str) -> tuple[str, str]:
    """Return the extra key that binds a digest's text into the first block of a block-hash chain."""
    return (MARK, text)


def content_identifier(text: str) -> str:
    """Return the content identifier that binds a digest's text where a connector hashes identifiers."""
    return f"{MARK}:{text}"


def nonce(random: bytes) -> Known:
    """Return an identity of its own for a request whose provenance is not known, never to be used again.

    Args:
        random: 16 fresh random bytes.
    """
    if len(random) != NONCE_BYTES:
        raise ValueError(f"A nonce has {NONCE_BYTES} bytes, not {len(random)}.")
    return Known(f"nonce:{random.hex()}")
