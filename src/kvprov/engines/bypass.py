"""Requests that bypass the shared tier: counted, and the first of each reason logged."""

from __future__ import annotations

import logging
from collections import Counter

_LOGGED_REASONS = 100


class Bypasses:
    """What bypassed the tier of one engine.

    Reasons may name what a tenant chose, such as a path. So the metric goes by their kind, the part before the first
    colon, and only so many are told apart in the log.

    Args:
        logger: The engine's.

    Attributes:
        counts: Requests by kind of reason.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.counts: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._logged: set[str] = set()

    def note(self, request_id: str, reason: str) -> None:
        """Count one request."""
        kind = reason.split(":", 1)[0]
        self.counts[kind] += 1
        self._untold[kind] += 1
        if reason not in self._logged and len(self._logged) < _LOGGED_REASONS:
            self._logged.add(reason)
            self._logger.warning("kvprov: request %s bypasses the shared tier: %s.", request_id, reason)

    def tell(self) -> dict[str, int]:
        """Return how many requests of each kind there were since the last call, for the metric (see `metrics`)."""
        told, self._untold = dict(self._untold), Counter()
        return told
