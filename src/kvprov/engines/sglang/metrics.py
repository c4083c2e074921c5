"""The metric of requests that bypass the store."""

from __future__ import annotations

from typing import Any

NAME = "sglang:kvprov_bypassed_requests"


def bypass_counter(server_args: Any) -> Any:
    """Return a counter of bypassing requests by kind of reason, or None where the engine serves no metrics."""
    if not server_args.enable_metrics:
        return None
    # Not before: SGLang sets up how its processes share their metrics first.
    from prometheus_client import Counter

    return Counter(NAME, "Requests that bypassed the shared KV cache since their provenance is not known.", ["reason"])
