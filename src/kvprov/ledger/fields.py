"""Configurations field by field: which of them differ, and how."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_DEPTH: Final = 64

Preimages = Callable[[str], Mapping[str, Any] | None]
"""Gives the configuration of an identity, or None where it is not recorded."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a configuration that differs.

    Attributes:
        path: Its names from the outermost object on, joined by dots.
        first: Its value in the first configuration as JSON; None where it is absent.
        second: The same, in the second.
    """

    path: str
    first: str | None
    second: str | None


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def flat(value: Any, path: str = "", depth: int = MAX_DEPTH) -> Iterator[tuple[str, str]]:
    """Give the path and the JSON of each value that is no object, or an empty one. Lists are values."""
    if isinstance(value, Mapping) and value and depth:
        for name, item in sorted(value.items()):
            yield from flat(item, f"{path}.{name}" if path else name, depth - 1)
    else:
        yield path, _json(value)


def differences(first: Any, second: Any, preimages: Preimages, path: str = "", depth: int = MAX_DEPTH) -> list[Field]:
    """Return the fields in which two configurations differ, by path.

    An identity within (a draft model's configuration) is followed to the configuration that it stands for, where both
    are recorded.
    """
    if first == second and _json(first) == _json(second):
        return []
    if depth and isinstance(first, Mapping) and isinstance(second, Mapping):
        found = []
        for name in sorted({*first, *second}):
            inner = f"{path}.{name}" if path else name
            if name in first and name in second:
                found += differences(first[name], second[name], preimages, inner, depth - 1)
            elif name in first:
                found += [Field(at, value, None) for at, value in flat(first[name], inner, depth - 1)]
            else:
                found += [Field(at, None, value) for at, value in flat(second[name], inner, depth - 1)]
        return found
    if depth and isinstance(first, str) and isinstance(second, str):
        one, other = preimages(first), preimages(second)
        if one is not None and other is not None:
            return differences(one, other, preimages, path, depth - 1)
    return [Field(path, _json(first), _json(second))]
