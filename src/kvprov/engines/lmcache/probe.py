"""Stands in for LMCache's server and for its transfers while keys are checked: notes each key and moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvprov.engines.lmcache.mp import spelled


class Answer:
    """A message's answer, which is there at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def query(self) -> bool:
        """Return whether the answer is there."""
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer."""
        del timeout
        return self._value


class Server:
    """A client of a server that finds all that it is asked for, or nothing.

    Args:
        note: Called with each key that is looked up.
        chunk: How many tokens a chunk has; 0 for a server that finds nothing.
    """

    def __init__(self, note: Callable[[str], None], chunk: int) -> None:
        self._note = note
        self._chunk = chunk
        self._found: dict[str, int] = {}

    def lookup(self, key: Any, *_: Any) -> Answer:
        """Note the key, and find its chunks or none."""
        self._note(spelled(key))
        self._found[key.request_id] = key.end // self._chunk if self._chunk else 0
        return Answer(None)

    def query_prefetch_status(self, request_id: str) -> Answer:
        """Return how many chunks were found."""
        return Answer(self._found[request_id])

    def report_block_allocation(self, *_: Any) -> None:
        """Ignore it: it is about blocks of the engine."""


class Transfer:
    """A worker's transfers, of which only the keys are noted.

    Args:
        note: Called with the key of each store and load.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def submit_store(self, request_id: str, key: Any, *_: Any, **__: Any) -> None:
        """Note the key."""
        self._note(spelled(key))

    def submit_retrieve(self, request_id: str, key: Any, *_: Any, **__: Any) -> None:
        """Note the key."""
        self._note(spelled(key))
