"""Engines whose stores and ledgers are looked at afterwards."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from tests.support.engine import KV_CACHE, Engine, Launch


def recorded(engine: Engine, *, seconds: float = 0.5) -> list[str]:
    """Wait for what the engine writes after it has answered, and return the digests that it recorded, in order."""
    time.sleep(seconds)
    binding = getattr(engine.core, "_kvprov_binding", None)
    if binding is None or not hasattr(binding.ledger, "flush"):
        return []
    assert binding.ledger.flush(10)
    return list(binding.ledger._known._kept)


@dataclass(frozen=True)
class WorkerLaunch(Launch):
    """A worker of `kvprov store check`, which serves its documents in a process that has imported vLLM already.

    Attributes:
        asked: What `kvprov.check.store.vllm_worker.run` takes.
    """

    asked: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Engine:
        from kvprov.check.store import vllm_worker

        for name in [name for name in os.environ if name.startswith("KVPROV_") and name != "KVPROV_CACHE_DIR"]:
            del os.environ[name]
        os.environ.update(self.env)
        # No GiB of cache for each of many engines.
        self.asked["arguments"]["kv_cache_memory_bytes"] = KV_CACHE
        vllm_worker.run(self.asked)
        return None  # type: ignore[return-value]
