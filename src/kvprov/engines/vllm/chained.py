"""Connectors whose keys are made of block hashes, which hold the digest already.

What is left to do here: to leave the model's path out of keys, which the digest's content replaces, so that the same
model shares its state wherever it is mounted; and to forget keys of requests that were stamped anew.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector as NativeMooncakeStore,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector as NativeOffloading
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector as NativeSimpleCPUOffload,
)

from kvprov.engines.vllm.bound import BoundConnector

MODEL_NAME: Final = "kvprov"
"""Stands in keys where vLLM has the model's path, or a part of it."""


def _without_path(vllm_config: Any) -> Any:
    """Return a copy of the configuration in which the model has no path of its own."""
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = MODEL_NAME
    return config


class _Chained(BoundConnector):
    """A connector that looks blocks up by hash."""

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the hashes that are looked up. Whoever loads or stores is handed the same ones."""
        return ["|".join(bytes(block).hex() for block in request.block_hashes) for request in requests], []


class OffloadingConnector(_Chained, NativeOffloading):  # type: ignore[misc]
    """OffloadingConnector whose keys hold no path, and forget what a request was bound to."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(_without_path(vllm_config), role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """Let a request bypass the tier whose provenance is not known."""
        super().on_new_request(request)
        self._apply(request)

    def kvprov_rebound(self, request: Any) -> None:
        """Make its keys anew."""
        state = self.scheduler._req_status.get(request.request_id)
        if state is not None:
            for group in state.group_states:
                group.offload_keys.clear()
            state.req_context._offload_key_positions.clear()
            state.update_offload_keys()
            self._apply(request)

    def _apply(self, request: Any) -> None:
        if self.reason_to_bypass(request):
            state = self.scheduler._req_status[request.request_id]
            state.max_load_tokens = state.max_offload_tokens = 0


class MooncakeStoreConnector(_Chained, NativeMooncakeStore):  # type: ignore[misc]
    """MooncakeStoreConnector whose keys hold no part of the model's path.

    Requests cannot be told to keep away from the store; those whose provenance is not known have hashes of their own.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(_without_path(vllm_config), role, kv_cache_config)

    def kvprov_rebound(self, request: Any) -> None:
        """Forget what was found under the former hashes."""
        scheduler = self.connector_scheduler
        assert scheduler is not None
        scheduler.client.discard(request.request_id)
        scheduler.load_specs.pop(request.request_id, None)


class SimpleCPUOffloadConnector(_Chained, NativeSimpleCPUOffload):  # type: ignore[misc]
    """SimpleCPUOffloadConnector. It keeps each block under the hash that the block was computed under."""
