"""JSON objects read strictly: what two readers could understand differently is refused."""

from __future__ import annotations

import json
from pathlib import Path

from kvprov.errors import UnreadableContentError

_ADVICE = "Fetch the file again from its source, or have its author write it anew."


def _no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the name {key[:80]!r} occurs twice in one object")
            seen.add(key)
    return result


def parse_object(data: bytes, path: str | Path) -> dict[str, object]:
    """Return the JSON object that `data` holds.

    Python's extensions `NaN` and `Infinity` are read, since engines read configurations with Python.

    Args:
        data: UTF-8 text.
        path: The file that it came from, for errors.

    Raises:
        UnreadableContentError: `data` is not UTF-8, not JSON, not an object, nested too deeply, or has an object in
            which a name occurs twice: readers differ in which of the two they take.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_doubles)
    except UnicodeDecodeError as error:
        raise UnreadableContentError(path, f"it is not UTF-8 text (byte {error.start})", _ADVICE) from error
    except RecursionError as error:
        raise UnreadableContentError(path, "its JSON is nested too deeply", _ADVICE) from error
    except ValueError as error:
        raise UnreadableContentError(path, f"it is not valid JSON: {error}", _ADVICE) from error
    if not isinstance(value, dict):
        raise UnreadableContentError(path, "its JSON is not an object", _ADVICE)
    return value
