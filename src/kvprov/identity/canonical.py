"""Configurations as canonical bytes (RFC 8785), and their identity."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Final

from kvprov.errors import KvprovError
from kvprov.identity import preimages

SCHEME: Final = "config-v1-sha256"

_MAX_INT: Final = 2**53 - 1
_ESCAPE: Final = "$"


def canonical_json(value: object) -> bytes:
    """Return the RFC 8785 form of `value`, in which equal values have equal bytes, and unequal ones do not.

    Equal means equal as JSON: `10000` and `10000.0` are one value, `-0.0` and `0` are one, a tuple is a list, and
    `true` is not `1`. What JSON cannot say is written as an object of one field: `{"$float": "NaN"}`,
    `"Infinity"` or `"-Infinity"`, and `{"$int": "0x..."}` for a whole number that no IEEE 754 double equals. So that
    no object can pose as one of these, names that start with `$` get another `$` in front.

    Args:
        value: `None`, a bool, an int, a float, a str, or a list, tuple or mapping of such; names are str.

    Raises:
        KvprovError: anything else (a set has no order, an enumeration no agreed text), or nested too deeply. The
            message names the field.
    """
    import rfc8785

    try:
        return rfc8785.dumps(_plain(value, "the value"))
    except RecursionError as error:
        raise KvprovError(
            "The configuration is nested too deeply, or holds itself.", "Flatten it, or leave that field out."
        ) from error


def config_identity(value: Mapping[str, object]) -> str:
    """Return the identity of a configuration: `config-v1-sha256:` and the hex of SHA-256 of its canonical JSON.

    The canonical JSON is kept for a while, see `kvprov.identity.preimages`.

    Raises:
        KvprovError: see `canonical_json`.
    """
    preimage = canonical_json(value)
    identity = f"{SCHEME}:{hashlib.sha256(preimage).hexdigest()}"
    preimages.keep(identity, preimage)
    return identity


# What rfc8785.dumps accepts; a recursive alias, so mypy knows it by name only.
_Plain = None | bool | int | float | str | list["_Plain"] | dict[str, "_Plain"]


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise KvprovError(
            f"{where} holds half a surrogate pair, which is no Unicode text.", "Correct the text."
        ) from error
    return value


def _number(value: int | float) -> _Plain:
    if isinstance(value, float):
        if math.isnan(value):
            return {"$float": "NaN"}
        if math.isinf(value):
            return {"$float": "Infinity" if value > 0 else "-Infinity"}
        # rfc8785 writes a whole double below 1e21 without an exponent or a fraction, as it writes an int.
        return value
    if abs(value) <= _MAX_INT:
        return value
    try:
        as_float = float(value)
    except OverflowError:
        return {"$int": hex(value)}
    return as_float if as_float == value else {"$int": hex(value)}


def _plain(value: object, where: str) -> _Plain:
    # Exact types: a subclass of str or int, such as an enumeration's member, may mean more than its value.
    if value is None or isinstance(value, bool):
        return value
    if type(value) is str:
        return _text(value, where)
    if type(value) is int or type(value) is float:
        return _number(value)
    if isinstance(value, Mapping):
        result: dict[str, _Plain] = {}
        for key, item in value.items():
            if type(key) is not str:
                raise KvprovError(
                    f"{where} has a name that is no text: {key!r:.80}.", "Turn the names of its fields into text."
                )
            name = _text(key, f"a name in {where}")
            result[_ESCAPE + name if name.startswith(_ESCAPE) else name] = _plain(item, f"{where}[{name[:80]!r}]")
        return result
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise KvprovError(
        f"{where} is of type {type(value).__name__}, which has no canonical JSON.",
        "Turn it into text, numbers, lists or mappings of these; sort a set into a list.",
    )
