"""The one base error of kvprov, and the contract's own errors."""

from __future__ import annotations

import enum


class KvprovError(Exception):
    """Base of every error that kvprov raises on purpose.

    Attributes:
        message: What happened, in one sentence.
        advice: What to do next, in one sentence; empty when there is nothing to do.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".rstrip()

    def __reduce__(self) -> tuple[object, ...]:
        # Engines hand errors from process to process. Exception's own way would call `type(self)(*self.args)`,
        # which fails for every subclass that takes other arguments than the message.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[KvprovError], args: tuple[object, ...], attributes: dict[str, object]) -> KvprovError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ErrorCode(enum.StrEnum):
    """The closed set of reasons why a descriptor has no digest (specification, section 6)."""

    BAD_NAME = "bad_name"
    BAD_IDENTITY = "bad_identity"
    DOUBLED_DIMENSION = "doubled_dimension"
    MISSING_DIMENSION = "missing_dimension"
    UNREGISTERED_DIMENSION = "unregistered_dimension"
    UNKNOWN_VALUE = "unknown_value"


class ContractError(KvprovError, ValueError):
    """A name, an identity or a descriptor that the contract does not allow.

    Attributes:
        code: Which rule was broken, one of the closed set `ErrorCode`.
        subject: The dimension name or the identity that broke it.
    """

    def __init__(self, code: ErrorCode, subject: str, message: str, advice: str) -> None:
        super().__init__(message, advice)
        self.code = code
        self.subject = subject
