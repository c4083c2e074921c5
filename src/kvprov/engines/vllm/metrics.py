"""The metric of bypassed requests, by the way that vLLM has for connectors.

The scheduler half of a connector counts in the engine core's process, and `/metrics` is served by another one. What a
connector returns as its statistics travels there with each step's results.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRIC = "vllm:kvprov_bypassed_requests"
"""vLLM removes metrics of its own prefix when an engine is made again in one process."""


class BypassStats(KVConnectorStats):  # type: ignore[misc]
    """How many requests bypassed the tier since the last report, by kind of reason."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: Any) -> BypassStats:
        """Add what another report counted."""
        for reason, count in other.data.items():
            self.data[reason] = self.data.get(reason, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line shows."""
        return {f"kvprov bypassed ({reason})": count for reason, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


class BypassMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counter in the process that serves metrics."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._bypassed = metric_types[Counter](
            name=METRIC,
            documentation="Requests that bypassed the shared tier, since their provenance is not known.",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        for reason, count in transfer_stats_data.items():
            self._bypassed.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
