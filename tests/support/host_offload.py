"""An offloading spec for engines without a GPU: vLLM's tiers, with a plain copy in place of the device's transfer.

vLLM (0.32) runs OffloadingConnector on GPUs alone, since its worker half copies blocks between device and host by CUDA.
Here both are host memory, so a worker that copies at once will do. Everything else is vLLM's own: the connector, the
tiering manager, the primary tier in host memory, and the tiers below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

SPEC = "HostOffloadingSpec"
BYTES = 32 << 20


class HostWorker(OffloadingWorker):
    """Copies blocks of the KV cache to and from the primary tier, before it answers.

    Args:
        kv_caches: The cache, as vLLM gives it to offloading workers.
        blocks_per_chunk: How many blocks of the cache one block of the primary tier holds.
        region: The primary tier's memory.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._layers_of_group = kv_caches.group_data_refs
        self._cache = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._tier = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        self._copy(job_id, dst_spec, src_spec, store=False)
        return True

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, *, store: bool) -> None:
        copied = 0
        block_ids, chunk_ids = map(int, blocks.block_ids), iter(map(int, chunks.block_ids))
        for layers, size, first in zip(self._layers_of_group, blocks.group_sizes, blocks.block_indices, strict=True):
            chunk = -1
            for index in range(first, first + size):
                within = index % self._blocks_per_chunk
                if index == first or within == 0:
                    chunk = next(chunk_ids)
                block = next(block_ids)
                for layer in layers:
                    ours = self._cache[layer.tensor_idx][block]
                    theirs = self._tier[layer.tensor_idx][chunk].view(self._blocks_per_chunk, -1)[within]
                    target, source = (theirs, ours) if store else (ours, theirs)
                    target.copy_(source)
                    copied += ours.numel()
        self._finished.append(TransferResult(job_id, success=True, transfer_size=copied, transfer_time=1e-6))

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._tier.clear()
        self._region.cleanup()


class HostOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering spec with the worker above."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker

    def get_manager(self) -> Any:
        manager = super().get_manager()
        # The workers have it mapped already; without a name it is gone with the last of them, however that one ends.
        Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return manager


def offloading(*secondary: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Return the members of the KV transfer configuration for OffloadingConnector with `secondary` tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": SPEC,
            "spec_module_path": __name__,
            "cpu_bytes_to_use": BYTES,
            "secondary_tiers": list(secondary),
            **extra,
        },
    }
