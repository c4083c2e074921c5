"""A dimension: one fact that shapes KV state, or that decides who may reuse it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from kvprov.contract.errors import ContractError, ErrorCode

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")


class Half(enum.StrEnum):
    """Where a dimension's value is known: once per worker, or per request."""

    WORKER = "worker"
    REQUEST = "request"


class Kind(enum.StrEnum):
    """Why a dimension is bound."""

    COMPUTATIONAL = "computational"
    """KV state differs when the value does (C1)."""
    PERMISSION = "permission"
    """Reuse is not allowed across values, even when the state is the same (C2)."""


def check_name(name: str) -> str:
    """Return `name` when it is a dimension name.

    Raises:
        ContractError: `bad_name`, when it does not match `[a-z][a-z0-9_]*(\\.[a-z0-9_]+)*`.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ContractError(
            ErrorCode.BAD_NAME,
            str(name),
            f"{name!r} is not a dimension name.",
            "Use lower-case letters, digits and underscores, starting with a letter; "
            "dots separate an owner's prefix, as in 'acme.rope_patch'.",
        )
    return name


@dataclass(frozen=True, slots=True)
class Dimension:
    """One entry of the registry.

    Attributes:
        name: `[a-z][a-z0-9_]*(\\.[a-z0-9_]+)*`; names from outside this package carry a dotted prefix.
        half: Whether the worker or the request supplies the value.
        kind: Whether the value shapes KV state or limits who may reuse it.
        why: Why the dimension is bound, for people who read the registry.

    Raises:
        ContractError: `bad_name`.
        ValueError: `half` or `kind` is not one of theirs.
    """

    name: str
    half: Half
    kind: Kind
    why: str

    def __post_init__(self) -> None:
        check_name(self.name)
        # A plain "worker" from outside the package would equal no member by identity, and the dimension would
        # silently be in neither half.
        object.__setattr__(self, "half", Half(self.half))
        object.__setattr__(self, "kind", Kind(self.kind))
