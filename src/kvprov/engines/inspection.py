"""What kvprov binds in an installed engine, for `kvprov doctor`: in a process of its own, never in one that serves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from kvprov.engines.seams import Seams
from kvprov.errors import BindingError


def examine(seams: Seams) -> list[dict[str, str]]:
    """Put every seam into effect, which is the surest way to see that it can be, and return what is wrong with each."""
    found = []
    # One at a time, so that the first that is missing does not hide the others.
    for seam in seams.all():
        error = advice = ""
        try:
            seams.install_one(seam)
        except BindingError as missing:
            error, advice = missing.message, missing.advice
        found.append({"module": seam.module, "name": seam.name, "error": error, "advice": advice})
    return found


def report(inspect: Callable[[], dict[str, Any]]) -> None:
    """Print what `inspect` returns as JSON, and nothing else: what the engine prints on stdout goes to stderr."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    result = inspect()
    with os.fdopen(stdout, "w", encoding="utf-8") as out:
        json.dump(result, out)
    sys.stdout.flush()
