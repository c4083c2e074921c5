"""The metric of bypassed requests, by the way that a connector's statistics travel.

Requests are counted in the engine core's process, and `/metrics` is served by another one. vLLM sends what a connector
measured along with each step's results; the counts go with it, under a name of their own, whatever the connector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

METRIC: Final = "vllm:kvprov_bypassed_requests"
"""vLLM removes metrics of its own prefix when an engine is made again in one process."""

_KEY: Final = "kvprov"
_BYPASSES: Final = "_kvprov_bypasses"
_COUNTER: Final = "_kvprov_counter"


def attach(scheduler: Any, bypasses: Any) -> None:
    """Let `scheduler` report what `bypasses` counts."""
    setattr(scheduler, _BYPASSES, bypasses)


def wrap_make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler.make_stats` that adds how many requests bypassed the tier since the last call, by reason."""

    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = original(self, *args, **kwargs)
        bypasses = getattr(self, _BYPASSES, None)
        if stats is not None and bypasses is not None and (told := bypasses.tell()):
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: told}
        return stats

    return make_stats


def wrap_log_observe(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `KVConnectorLogging.observe` that shows the connector its own statistics only."""

    def observe(self: Any, transfer_stats_data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        native = {key: value for key, value in transfer_stats_data.items() if key != _KEY}
        if native:
            original(self, native, *args, **kwargs)

    return observe


def wrap_prom_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `KVConnectorProm.__init__` that also makes the counter."""
    from prometheus_client import Counter

    def init(self: Any, vllm_config: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        original(self, vllm_config, labelnames, per_engine_labelvalues)
        if vllm_config.kv_transfer_config is not None:
            # The class's own kind of counter: with Ray, it is not Prometheus's.
            kind = getattr(self, "_counter_cls", Counter)
            counter = kind(
                name=METRIC,
                documentation="Requests that bypassed the shared tier, since their provenance is not known.",
                labelnames=[*labelnames, "reason"],
            )
            setattr(self, _COUNTER, (counter, per_engine_labelvalues))

    return init


def wrap_prom_observe(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `KVConnectorProm.observe` that adds to the counter."""

    def observe(self: Any, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        native = {key: value for key, value in transfer_stats_data.items() if key != _KEY}
        if native:
            original(self, native, engine_idx)
        counter = getattr(self, _COUNTER, None)
        for reason, count in transfer_stats_data.get(_KEY, {}).items():
            if counter is not None:
                counter[0].labels(*counter[1][engine_idx], reason).inc(count)

    return observe
