"""Fields of a model's configuration, wherever a release of transformers keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WINDOW: Final = "sliding_window"
ROTARY_BASE: Final = "rope_theta"


def rotary_bases(fields: Mapping[str, Any]) -> list[float]:
    """Return the rotary bases of a configuration, nested ones included."""
    found = [float(fields[ROTARY_BASE])] if isinstance(fields.get(ROTARY_BASE), int | float) else []
    for value in fields.values():
        if isinstance(value, Mapping):
            found += rotary_bases(value)
    return found


def set_rotary_base(fields: dict[str, Any], base: object) -> bool:
    """Replace every rotary base of a configuration, and say whether there was one."""
    found = ROTARY_BASE in fields
    if found:
        fields[ROTARY_BASE] = base
    for name, value in fields.items():
        if isinstance(value, Mapping):
            fields[name] = dict(value)
            found |= set_rotary_base(fields[name], base)
    return found


def merged(old: Any, new: Any) -> Any:
    """Return `new` where it replaces `old`: a table is merged into a table."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}
    return new
