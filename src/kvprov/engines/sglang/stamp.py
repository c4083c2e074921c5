"""The stamp: what one request's keys are bound to, noted on SGLang's request object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_ATTRIBUTE = "_kvprov"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What one request's keys are bound to.

    Attributes:
        text: The digest's text. For a request whose provenance is not known, that of an identity of its own.
        epoch: Which of the worker's successive halves `text` stands for.
        reason: Why the provenance is not known; empty when it is. Such a request bypasses the store.
        barred: Whether not even this engine may keep what the request computes.
        namespace: The client's own namespace, as it came, or None.
        salt: The tenant's salt, as it came, or None.
    """

    text: str
    epoch: int
    reason: str
    barred: bool
    namespace: str | None = field(repr=False)
    salt: str | None = field(repr=False)


def set_stamp(request: Any, stamp: Stamp) -> None:
    """Note `stamp` on one of SGLang's requests, in both fields that every level's keys are made of.

    The namespace alone would do for keys; KV events name blocks by the salt and not by the namespace.
    """
    request.__dict__[_ATTRIBUTE] = stamp
    request.extra_key = request.cache_salt = stamp.text


def stamp_of(request: Any) -> Stamp | None:
    """Return the stamp of one of SGLang's requests, or None when it has none."""
    stamp: Stamp | None = vars(request).get(_ATTRIBUTE)
    return stamp
