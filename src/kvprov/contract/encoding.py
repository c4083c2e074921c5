"""The canonical encoding, version 1: injective and length-prefixed (specification, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvprov.contract.descriptor import Absent, Descriptor, Known, Unknown, Value
from kvprov.contract.dimension import Half
from kvprov.contract.errors import ContractError, ErrorCode
from kvprov.contract.registry import Registry

ENCODING: Final = "kv-provenance/1"
WORKER_ENCODING: Final = "kv-provenance/1/worker"


def u32(n: int) -> bytes:
    """Return `n` as 4 bytes, big-endian."""
    return n.to_bytes(4, "big")


def u64(n: int) -> bytes:
    """Return `n` as 8 bytes, big-endian."""
    return n.to_bytes(8, "big")


def lp(data: bytes | str) -> bytes:
    """Return `data` behind its length: `u64(len) || data`. Text is UTF-8."""
    raw = data.encode() if isinstance(data, str) else data
    return u64(len(raw)) + raw


def encode_value(name: str, value: Value) -> bytes:
    """Return the encoding of one value.

    Raises:
        ContractError: `unknown_value`: an unknown value has no encoding, so that it can never meet a key.
    """
    if isinstance(value, Absent):
        return b"\x00"
    if isinstance(value, Known):
        return b"\x01" + lp(value.identity)
    # Whatever else is given is unknown too, and must be refused as such, not crash on its way here.
    reason = value.reason if isinstance(value, Unknown) else f"a {type(value).__name__} is no value"
    raise ContractError(
        ErrorCode.UNKNOWN_VALUE,
        name,
        f"The value of {name!r} is not known" + (f": {reason}." if reason else "."),
        "Let the request bypass the shared tier, or declare a label for the value.",
    )


def check_half(registry: Registry, half: Half, values: Mapping[str, Value]) -> None:
    """Check that `values` names exactly the dimensions that `registry` has in `half`.

    Raises:
        ContractError: `missing_dimension` or `unregistered_dimension`.
    """
    names = registry.names(half)
    for name in names:
        if name not in values:
            raise ContractError(
                ErrorCode.MISSING_DIMENSION,
                name,
                f"The {half} half has no value for the dimension {name!r}.",
                "Give every registered dimension a value: absent, known or unknown.",
            )
    for name in values:
        if name not in names:
            raise ContractError(
                ErrorCode.UNREGISTERED_DIMENSION,
                name,
                f"The {half} half has a value for {name!r}, which is not registered there.",
                "Register the dimension, or leave its value out.",
            )


def encode_half(registry: Registry, half: Half, values: Mapping[str, Value]) -> bytes:
    """Return the encoding of one half of a descriptor.

    Args:
        registry: The declared dimensions.
        half: Which half `values` is.
        values: A value for each of the half's dimensions, in any order.

    Raises:
        ContractError: `missing_dimension`, `unregistered_dimension` or `unknown_value`.
    """
    check_half(registry, half, values)
    names = registry.names(half)
    return lp(half) + u32(len(names)) + b"".join(lp(name) + encode_value(name, values[name]) for name in names)


def encode(registry: Registry, descriptor: Descriptor) -> bytes:
    """Return `enc(p)`: the preimage of the digest.

    Raises:
        ContractError: see `encode_half`.
    """
    worker = encode_half(registry, Half.WORKER, descriptor.worker)
    return lp(ENCODING) + worker + encode_half(registry, Half.REQUEST, descriptor.request)
