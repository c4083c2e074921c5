"""Keys of the same cases in another process: `python -m kvprov.check.child NAME`, cases on stdin, keys on stdout.

A key that follows an address in memory, a random number or the order in which things were loaded differs there.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from kvprov.check.case import Case
from kvprov.check.errors import CheckError
from kvprov.check.keys import BUILT_IN, KeyFunction, evaluate, key_function

TIMEOUT: Final = 300.0
"""Seconds. Importing an engine takes tens of them."""


def importable_name(key: KeyFunction) -> str | None:
    """Return the name by which another process finds `key`, or None when it cannot: a lambda, or one made in a test."""
    for name, function in BUILT_IN.items():
        if key is function:
            return name
    name = f"{getattr(key, '__module__', '')}:{getattr(key, '__qualname__', '')}"
    module = sys.modules.get(getattr(key, "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, "__name__", "") == "__main__" or "<" in name:
        return None
    try:
        return name if key_function(name) is key else None
    except CheckError:
        return None


def keys_elsewhere(name: str, cases: Sequence[Case]) -> list[bytes]:
    """Return the keys of `cases` as another process derives them.

    Raises:
        CheckError: It fails there.
    """
    code = f"import sys; sys.path[:0] = {sys.path!r}; from kvprov.check.child import main; main()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, name], input=pickle.dumps(list(cases)), capture_output=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(
            f"The key function {name} took longer than {TIMEOUT:.0f} s in a second process.", "Make it quicker."
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CheckError(
            f"The key function {name} fails in a second process: {last[:500]}.", "See that it can be imported there."
        )
    # What this process was sent by a process that it started itself, of its own code.
    keys: list[bytes] = pickle.loads(done.stdout)
    return keys


def main() -> None:
    """Read cases, write their keys."""
    # The key code may print: its output must not meet ours.
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    key = key_function(sys.argv[1])
    cases: list[Case] = pickle.loads(sys.stdin.buffer.read())
    output.write(pickle.dumps([evaluate(key, case) for case in cases]))
