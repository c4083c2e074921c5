"""Every error that kvprov raises on purpose: one base, each with advice on what to do next.

KvprovError
├── ContractError          a name, identity or descriptor that the contract does not allow
├── UnreadableContentError a checkpoint or adapter that is broken, hostile or cannot be opened
├── UnidentifiableError    content whose format kvprov does not read: its identity is unknown
├── ChangedContentError    content that changed while it was being identified or loaded
├── SettingsError          a KVPROV_* setting that cannot be used
├── BindingError           an engine in which binding is not, or cannot be, in effect
├── EventError             a KV event that is not what a bound engine publishes
├── LedgerError            a ledger that cannot be read, or a key that it does not explain
└── StoreError             a store that cannot be compared
"""

from __future__ import annotations

from pathlib import Path

from kvprov.contract.errors import ContractError, ErrorCode, KvprovError

__all__ = [
    "BindingError",
    "ChangedContentError",
    "ContractError",
    "ErrorCode",
    "EventError",
    "KvprovError",
    "LedgerError",
    "SettingsError",
    "StoreError",
    "UnidentifiableError",
    "UnreadableContentError",
]


class _ContentError(KvprovError):
    """An error about one file or folder.

    Attributes:
        path: The file or folder.
        reason: What is wrong with it.
    """

    def __init__(self, path: str | Path, reason: str, advice: str = "") -> None:
        super().__init__(f"{path}: {reason}.", advice)
        self.path = Path(path)
        self.reason = reason


class UnreadableContentError(_ContentError):
    """A checkpoint or adapter that is broken, hostile, incomplete or cannot be opened."""


class UnidentifiableError(_ContentError):
    """Content in a format that kvprov does not read. Its identity is unknown unless the operator declares a label."""


class ChangedContentError(_ContentError):
    """Content that changed between being identified and being loaded."""


class SettingsError(KvprovError):
    """A `KVPROV_*` setting that cannot be used."""


class BindingError(KvprovError):
    """An engine in which binding is not in effect, or a connector that cannot be bound."""


class EventError(KvprovError):
    """A KV event that is not what a bound engine publishes, or whose hashes cannot be computed."""


class LedgerError(KvprovError):
    """A ledger that cannot be read, or a key that it does not explain."""


class StoreError(KvprovError):
    """A store that cannot be compared."""
