"""The stamp: what one request's keys are bound to, noted on vLLM's request object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvprov.contract.descriptor import Value
from kvprov.contract.digest import Digester
from kvprov.contract.key import DigestBits, chain_entry, content_identifier, key_text

_ATTRIBUTE = "_kvprov"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What one request's keys are bound to.

    Attributes:
        text: The digest's text. For a request whose provenance is not known, that of an identity of its own.
        entry: The extra keys of the first block of the request's block-hash chain.
        reason: Why the provenance is not known; empty when it is. Such a request bypasses the shared tier.
        epoch: Which of the engine's successive worker halves `text` stands for.
        adapter: Identity of the adapter that `text` stands for, or None.
    """

    text: str
    entry: tuple[tuple[str, str]]
    epoch: int = 0
    reason: str = ""
    adapter: str | None = None

    @property
    def identifier(self) -> str:
        """The content identifier that carries the digest where a connector hashes identifiers."""
        return content_identifier(self.text)


def make_stamp(
    digester: Digester,
    values: Mapping[str, Value],
    bits: DigestBits,
    *,
    epoch: int = 0,
    reason: str = "",
    adapter: str | None = None,
) -> Stamp:
    """Return the stamp of a request.

    Args:
        digester: Of the request's worker.
        values: Of the request half; none of them unknown.
        bits: How much of the digest enters keys.
        epoch: Which of the engine's successive worker halves `digester` is.
        reason: Why the provenance is not known.
        adapter: Identity of the request's adapter.

    Raises:
        ContractError: see `Digester.digest`.
    """
    text = key_text(digester.digest(values), bits)
    return Stamp(text, (chain_entry(text),), epoch, reason, adapter)


def set_stamp(request: Any, stamp: Stamp) -> None:
    """Note `stamp` on one of vLLM's requests."""
    setattr(request, _ATTRIBUTE, stamp)


def stamp_of(request: Any) -> Stamp | None:
    """Return the stamp of one of vLLM's requests, or None when it has none."""
    return getattr(request, _ATTRIBUTE, None)
