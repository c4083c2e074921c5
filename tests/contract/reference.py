"""A second implementation of the encoding, written from the specification, with a decoder.

It shares no code with kvprov, and does things another way where there is another way: character sets instead of
regular expressions, integers instead of base64. Documents are plain JSON values. The decoder is what shows that
the encoding is injective: if every encoding decodes to what was encoded, no two inputs share one.
"""

from __future__ import annotations

import hashlib
import string
import struct
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Half: TypeAlias = dict[str, str | None]
"""Name to identity; None is absent."""

HALVES = ("worker", "request")
LOWER = frozenset(string.ascii_lowercase)
NAME = LOWER | frozenset(string.digits + "_")
SCHEME = LOWER | frozenset(string.digits + ".-")
BASE64URL = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


class Refused(Exception):  # noqa: N818
    """A document without a digest; `args[0]` is the code."""


def is_name(name: str) -> bool:
    parts = name.split(".")
    return all(part and set(part) <= NAME for part in parts) and name[0] in LOWER


def is_identity(identity: str) -> bool:
    scheme, colon, payload = identity.partition(":")
    return (
        bool(scheme and colon and payload)
        and scheme[0] in LOWER
        and set(scheme) <= SCHEME
        and all(0x21 <= ord(character) <= 0x7E for character in payload)
        and len(identity.encode()) <= 1024
    )


def check(document: Json) -> None:
    """Section 6 of the specification, step by step."""
    registry, descriptor = document["registry"], document["descriptor"]
    registered = registry["worker"] + registry["request"]
    if not all(map(is_name, registered)):
        raise Refused("bad_name")
    if len(registered) != len(set(registered)):
        raise Refused("doubled_dimension")
    if not all(is_name(name) for half in HALVES for name in descriptor[half]):
        raise Refused("bad_name")
    # Step 4, doubled names in the descriptor, cannot occur in a parsed object.
    for half in HALVES:
        for value in descriptor[half].values():
            if value["state"] == "known" and not is_identity(value["identity"]):
                raise Refused("bad_identity")
    for half in HALVES:
        names, values = set(registry[half]), descriptor[half]
        if names - values.keys():
            raise Refused("missing_dimension")
        if values.keys() - names:
            raise Refused("unregistered_dimension")
        if any(value["state"] == "unknown" for value in values.values()):
            raise Refused("unknown_value")


def framed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">Q", len(raw)) + raw


def encode_half(tag: str, values: Json) -> bytes:
    out = framed(tag) + struct.pack(">I", len(values))
    for name in sorted(values, key=str.encode):
        out += framed(name)
        out += b"\x00" if values[name]["state"] == "absent" else b"\x01" + framed(values[name]["identity"])
    return out


def encode(document: Json) -> bytes:
    check(document)
    descriptor = document["descriptor"]
    return framed("kv-provenance/1") + b"".join(encode_half(half, descriptor[half]) for half in HALVES)


def worker_digest(document: Json) -> bytes:
    worker = encode_half("worker", document["descriptor"]["worker"])
    return hashlib.sha256(framed("kv-provenance/1/worker") + worker).digest()


def text(data: bytes) -> str:
    """Unpadded base64url, by arithmetic."""
    characters = -(-len(data) * 8 // 6)
    number = int.from_bytes(data, "big") << (characters * 6 - len(data) * 8)
    return "".join(BASE64URL[(number >> (6 * place)) & 63] for place in reversed(range(characters)))


def evaluate(document: Json) -> dict[str, str]:
    """The five results of a vector."""
    enc = encode(document)
    digest = hashlib.sha256(enc).digest()
    return {
        "enc_hex": enc.hex(),
        "digest_hex": digest.hex(),
        "worker_digest_hex": worker_digest(document).hex(),
        "text": text(digest),
        "text_128": text(digest[:16]),
    }


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError("truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def framed(self) -> str:
        return self.take(int.from_bytes(self.take(8), "big")).decode("ascii")

    def half(self, tag: str) -> Half:
        if self.framed() != tag:
            raise ValueError("another half")
        values: Half = {}
        last = ""
        for _ in range(int.from_bytes(self.take(4), "big")):
            name = self.framed()
            if not is_name(name) or name <= last:
                raise ValueError("a bad name, or names out of order")
            last = name
            state = self.take(1)
            if state not in (b"\x00", b"\x01"):
                raise ValueError("no such state")
            identity = self.framed() if state == b"\x01" else None
            if identity is not None and not is_identity(identity):
                raise ValueError("a bad identity")
            values[name] = identity
        return values


def decode(enc: bytes) -> tuple[Half, Half]:
    """Return both halves, or raise ValueError when `enc` is not exactly one encoding."""
    reader = _Reader(enc)
    if reader.framed() != "kv-provenance/1":
        raise ValueError("another encoding")
    halves = reader.half("worker"), reader.half("request")
    if reader.at != len(enc):
        raise ValueError("trailing bytes")
    return halves
