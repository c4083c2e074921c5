"""An engine's configuration as plain facts, before any of it becomes an identity."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from kvprov.contract.errors import KvprovError


def plain(value: Any) -> Any:
    """Return `value` as mappings, lists and scalars.

    Raises:
        KvprovError: `value` holds an object whose meaning is not known. It is refused rather than guessed.
    """
    import torch

    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise KvprovError(
        f"A configuration holds a {type(value).__module__}.{type(value).__qualname__}, whose meaning is not known.",
        "Declare a label for what it belongs to, or report the configuration.",
    )
