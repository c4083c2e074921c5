"""Workers of `kvprov store check` on this CPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.support.sglang.engine import Engine, Launch

CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "lora_backend": "torch_native",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}
"""What SGLang is to be told in addition where there is no accelerator."""


class _Ended:
    """Stands for the engine of a worker that has waited for its store itself."""

    def wait_until_written(self) -> None:
        """There is nothing more to come."""


@dataclass(frozen=True)
class WorkerLaunch(Launch):
    """A worker of `kvprov store check`, which serves its documents in processes that have imported SGLang already.

    Attributes:
        asked: What `kvprov.check.store.sglang_worker.run` takes.
    """

    asked: dict[str, Any] = field(default_factory=dict)

    def start(self) -> Engine:
        from kvprov.check.store import sglang_worker

        for name in [name for name in os.environ if name.startswith("KVPROV_") and name != "KVPROV_CACHE_DIR"]:
            del os.environ[name]
        # As a worker that is started does not have it.
        os.environ.pop("SGLANG_PLUGINS", None)
        os.environ.update(self.env)
        sys.path[:0] = self.path
        sglang_worker.run(self.asked)
        return _Ended()  # type: ignore[return-value]
