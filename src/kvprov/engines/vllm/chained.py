"""Connectors whose keys are made of block hashes, which hold the digest already.

What is left to do here: to put the parallel shape into keys in place of the model's path, which the digest's content
replaces, so that the same model shares its state wherever it is mounted, and engines of another shape do not; to keep
requests away from the tier whose provenance is not known; and to forget keys of requests that were stamped anew.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector as NativeMooncakeStore,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector as NativeOffloading
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector as NativeSimpleCPUOffload,
)

from kvprov.engines.vllm import peers
from kvprov.engines.vllm.bound import BoundConnector

MODEL_NAME: Final = "kvprov"
"""Stands in keys where vLLM has the model's path, or a part of it."""


def _shape(parallel_config: Any) -> str:
    return (
        f"tp{parallel_config.tensor_parallel_size}-pp{parallel_config.pipeline_parallel_size}"
        f"-pcp{parallel_config.prefill_context_parallel_size}-dcp{parallel_config.decode_context_parallel_size}"
    )


def _extra(vllm_config: Any) -> Mapping[str, Any]:
    return vllm_config.kv_transfer_config.kv_connector_extra_config or {}


def _renamed(vllm_config: Any, portable: bool) -> Any:
    """Return a copy of the configuration in which the model is called by its parallel shape, not by its path.

    Args:
        vllm_config: The engine's configuration.
        portable: Whether the operator asked for entries that engines of every shape can read.

    vLLM (0.32) takes entries of most models for portable although each rank's part holds all of its layers, and lets
    an engine of one rank read what two ranks wrote, with the layers mixed up. Where it is told to write a portable form
    it names the shape itself if the cache cannot be brought into one.
    """
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = MODEL_NAME if portable else f"{MODEL_NAME}-{_shape(vllm_config.parallel_config)}"
    return config


class _Chained(BoundConnector):
    """A connector that looks blocks up by hash."""

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the hashes that are looked up. Whoever loads or stores is handed the same ones."""
        return ["|".join(bytes(block).hex() for block in request.block_hashes) for request in requests], []


class OffloadingConnector(_Chained, NativeOffloading):  # type: ignore[misc]
    """OffloadingConnector whose keys hold the shape for the path, and forget what a request was bound to."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        portable = bool(_extra(vllm_config).get("canonical_layout"))
        super().__init__(_renamed(vllm_config, portable), role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """Keep a request away from the tier whose provenance is not known, and from peers that are not listed."""
        assert self._binding is not None
        parameters, strangers = peers.allowed(request.kv_transfer_params, self._binding.settings.peers)
        if strangers:
            request.kv_transfer_params = parameters
            self._binding.strangers.note(strangers)
        super().on_new_request(request)
        self._restrain(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Leave out states that the engine hands over beside the blocks: a limit of no tokens does not stop them."""
        state, known = scheduler_output.kv_connector_block_state, self.scheduler._req_status
        if state is not None and state.boundary_state_offloads:
            kept = {
                request_id: states
                for request_id, states in state.boundary_state_offloads.items()
                if request_id in known and not self.reason_to_bypass(known[request_id].req)
            }
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.kv_connector_block_state = replace(state, boundary_state_offloads=kept)
        return super().build_connector_meta(scheduler_output)

    def kvprov_rebound(self, request: Any) -> None:
        """Make its keys anew. Transfers under way keep theirs: what they move was computed before."""
        state = self.scheduler._req_status.get(request.request_id)
        if state is None:
            return
        for group in state.group_states:
            group.offload_keys.clear()
            if request.num_computed_tokens == 0:
                # What it computed before a preemption, it computes again, and nothing is stored under the new keys.
                group.next_stored_chunk_idx = 0
        state.partial_tail_boundary = None
        state.update_offload_keys()
        # The limits that its client asked for, if any: it may have been restrained under the former stamp.
        asked = type(state)(state.config, request, state.req_context, state.offloading_context)
        state.max_load_tokens, state.max_offload_tokens = asked.max_load_tokens, asked.max_offload_tokens
        self._restrain(request)

    def _restrain(self, request: Any) -> None:
        if self.reason_to_bypass(request):
            state = self.scheduler._req_status[request.request_id]
            state.max_load_tokens = state.max_offload_tokens = 0


class MooncakeStoreConnector(_Chained, NativeMooncakeStore):  # type: ignore[misc]
    """MooncakeStoreConnector whose keys hold the shape for the last part of the model's path."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = _extra(vllm_config)
        portable = extra.get("store_tp_size") is not None or extra.get("enable_store_tp_lcm") is True
        super().__init__(_renamed(vllm_config, portable), role, kv_cache_config)
        if self.connector_scheduler is not None:
            self._reference_native = self.connector_scheduler._reference_save_blocks
            self.connector_scheduler._reference_save_blocks = self._reference_save_blocks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Find nothing for requests whose provenance is not known."""
        if self.reason_to_bypass(request):
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def _reference_save_blocks(self, metadata: Any) -> None:
        """Drop stores of requests whose provenance is not known, before blocks are held for them.

        A store that is not dropped here, or no more in a later release, goes by a hash that nobody else has.
        """
        unfinished = self.connector_scheduler._unfinished_requests

        def drops(store: Any) -> bool:
            known = unfinished.get(store.req_id)
            # What has a number is held already: it is of a request that has finished.
            return store.can_save and store.store_job_id is None and known and bool(self.reason_to_bypass(known[0]))

        metadata.requests = [store for store in metadata.requests if not drops(store)]
        self._reference_native(metadata)

    def kvprov_rebound(self, request: Any) -> None:
        """Forget what was found under the former hashes."""
        scheduler = self.connector_scheduler
        assert scheduler is not None
        scheduler.client.discard(request.request_id)
        scheduler.load_specs.pop(request.request_id, None)


class SimpleCPUOffloadConnector(_Chained, NativeSimpleCPUOffload):  # type: ignore[misc]
    """SimpleCPUOffloadConnector. It keeps each block under the hash that the block was computed under.

    In its lazy mode it copies whatever the engine's own cache is about to lose, of bypassing requests, too: under a
    hash that nobody else has.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Find nothing for requests whose provenance is not known."""
        if self.reason_to_bypass(request):
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a request, of which blocks are stored from then on, unless its provenance is not known."""
        if not self.reason_to_bypass(request):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def kvprov_rebound(self, request: Any) -> None:
        """Let go of what was found under the former hashes, and store no more of a request that now bypasses."""
        manager = self.scheduler_manager
        if manager is None:
            return
        found = manager._pending_cpu_hits.pop(request.request_id, None)
        if found is not None:
            manager._free_pending_cpu_hit(found)
        if self.reason_to_bypass(request):
            manager._cleanup_store_request(request.request_id)
