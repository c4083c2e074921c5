"""The descriptor: the value of each registered dimension, in two halves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvprov.contract.errors import ContractError, ErrorCode

MAX_IDENTITY_BYTES: Final = 1024
_IDENTITY = re.compile(r"[a-z][a-z0-9.-]*:[\x21-\x7e]+")


def check_identity(identity: str) -> str:
    """Return `identity` when it has the form `scheme:payload`.

    Raises:
        ContractError: `bad_identity`, when the scheme does not match `[a-z][a-z0-9.-]*`, the payload is
            empty or holds anything but printable ASCII without spaces, or the whole exceeds 1024 bytes.
    """
    if not isinstance(identity, str) or len(identity) > MAX_IDENTITY_BYTES or _IDENTITY.fullmatch(identity) is None:
        shown = repr(identity) if len(repr(identity)) <= 80 else repr(identity)[:77] + "..."
        raise ContractError(
            ErrorCode.BAD_IDENTITY,
            str(identity),
            f"{shown} is not an identity.",
            "Write scheme:payload, where the scheme is lower-case and the payload printable ASCII without spaces, "
            f"at most {MAX_IDENTITY_BYTES} bytes in all; hash what is larger.",
        )
    return identity


@dataclass(frozen=True, slots=True)
class Absent:
    """The dimension does not apply: a request without an adapter has the adapter absent."""


@dataclass(frozen=True, slots=True)
class Known:
    """The dimension has this stable identity.

    Attributes:
        identity: `scheme:payload`, see `check_identity`.

    Raises:
        ContractError: `bad_identity`.
    """

    identity: str

    def __post_init__(self) -> None:
        check_identity(self.identity)


@dataclass(frozen=True, slots=True)
class Unknown:
    """The dimension applies, and its identity could not be established: such a request bypasses the tier.

    Attributes:
        reason: Why, for logs. It is no part of the value.
    """

    reason: str = field(default="", compare=False)


Value: TypeAlias = Absent | Known | Unknown
ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What shaped one request's KV state, and who may reuse it.

    Attributes:
        worker: Value of each worker-half dimension, by name.
        request: Value of each request-half dimension, by name.
    """

    worker: Mapping[str, Value]
    request: Mapping[str, Value]
