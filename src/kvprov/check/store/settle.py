"""Waiting for a store to be as it will be: tiers write behind the engine's back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

SETTLE_SECONDS: Final = 0.5
LIMIT_SECONDS: Final = 20


def settle(store: Path, at_least: int = 0) -> None:
    """Wait until nothing has been written for a while.

    Args:
        store: The store's folder.
        at_least: How many files to wait for first. After a while they are no longer waited for: what is not there is
            seen when stores are compared.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(_files(store)) < at_least and time.monotonic() < deadline:
        time.sleep(0.05)
    before: object = None
    while (now := _files(store)) != before:
        before = now
        time.sleep(SETTLE_SECONDS)


def _files(store: Path) -> list[tuple[str, int]]:
    return sorted((str(file), file.stat().st_size) for file in store.rglob("*") if file.is_file())
