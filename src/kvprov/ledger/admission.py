"""How many records a worker may write: adapters and worker halves as they come, salts up to a rate.

Clients choose salts and namespaces freely, and each makes a digest of its own. A client that sends a new salt with
every request must not fill the ledger, nor keep the salts of others out of it. So a digest with something that a client
chose takes a token. There are two buckets: one for digests that are seen for the first time, one for those that come
back. A flood of salts that are used once empties the first alone, and a tenant that stays is recorded by the second.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Most records that one process writes in an hour, and most that it remembers.

    Attributes:
        plain: Digests without a salt or a namespace: of adapters and worker halves.
        first: Digests with one, seen for the first time.
        again: Digests with one, seen before.
        remembered: Digests of each kind that are kept in memory.
        queued: Records that wait to be written.
    """

    plain: int = 4096
    first: int = 256
    again: int = 256
    remembered: int = 8192
    queued: int = 1024


class Remembered:
    """The last so many of what was added. One thread adds; others may ask meanwhile."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[Hashable, None] = {}

    def __contains__(self, item: Hashable) -> bool:
        return item in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, item: Hashable) -> None:
        """Remember `item`, and forget the oldest if there are too many."""
        self._kept[item] = None
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]


class Bucket:
    """Tokens that come back at a steady rate.

    Args:
        per_hour: How many come back in an hour, and how many there are at first and at most.
        clock: Gives seconds.
    """

    def __init__(self, per_hour: int, clock: Callable[[], float]) -> None:
        self._per_hour = per_hour
        self._clock = clock
        self._tokens = float(per_hour)
        self._at = clock()

    def take(self) -> bool:
        """Take a token, if there is one."""
        now = self._clock()
        self._tokens = min(self._per_hour, self._tokens + (now - self._at) / HOUR * self._per_hour)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """Put back a token that was not used."""
        self._tokens = min(self._per_hour, self._tokens + 1)


class Admission:
    """Decides which digests are recorded. For one thread.

    Args:
        limits: How many.
        clock: Gives seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._plain, self._first, self._again = (
            Bucket(count, clock) for count in (limits.plain, limits.first, limits.again)
        )
        self._seen = Remembered(limits.remembered)

    def admit(self, digest: Hashable, *, chosen: bool) -> Bucket | None:
        """Return the bucket from which `digest` took a token, or None when it is not to be recorded.

        Args:
            digest: What is to be recorded.
            chosen: Whether a client chose a part of it freely.
        """
        if not chosen:
            return self._plain if self._plain.take() else None
        if digest in self._seen:
            return self._again if self._again.take() else None
        if self._first.take():
            return self._first
        self._seen.add(digest)
        return None
