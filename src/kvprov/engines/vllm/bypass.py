"""Requests that bypass the shared tier: counted, and the first of each reason logged."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvprov.engines.vllm.log import logger

_LOGGED_REASONS = 100
_metric: Any = None


def _count(kind: str) -> None:
    """Count in Prometheus, whose client vLLM depends on and whose registry it serves."""
    global _metric
    if _metric is None:
        from prometheus_client import Counter as PrometheusCounter

        _metric = PrometheusCounter(
            "kvprov_bypassed_requests", "Requests that bypassed the shared tier", labelnames=("reason",)
        )
    _metric.labels(reason=kind).inc()


class Bypasses:
    """What bypassed the tier of one engine.

    Reasons may name what a tenant chose, such as a path. So the metric goes by their kind, the part before the first
    colon, and only so many are told apart in the log.

    Attributes:
        counts: Requests by kind of reason.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def note(self, request_id: str, reason: str) -> None:
        """Count one request."""
        kind = reason.split(":", 1)[0]
        self.counts[kind] += 1
        _count(kind)
        if reason not in self._logged and len(self._logged) < _LOGGED_REASONS:
            self._logged.add(reason)
            logger.warning("kvprov: request %s bypasses the shared tier: %s.", request_id, reason)
