"""LMCache's in-process form on a CPU, for which it has no class that copies between vLLM's cache and its own memory.

Only the copy is ours; keys, lookups, backends and servers are LMCache's.
"""

from __future__ import annotations

import functools
from typing import Any


def _copy_class() -> Any:
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.memory_management import MemoryFormat

    class CpuCopies(GPUConnectorInterface):
        """Copies slots of caches of (blocks, heads, tokens, keys and values) to and from (2, layers, tokens, ...)."""

        def __init__(self, metadata: Any) -> None:
            self._layers, _, _, self._heads, self._size = metadata.kv_shape

        def _slots(self, start: int, end: int, slot_mapping: Any, tokens: int) -> tuple[Any, Any]:
            slots = slot_mapping[start:end].long()
            return slots // tokens, slots % tokens

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for layer, cache in enumerate(kwargs["kvcaches"]):
                blocks, offsets = self._slots(start, end, kwargs["slot_mapping"], cache.shape[2])
                keys, values = cache[blocks, :, offsets].split(self._size, dim=-1)
                memory_obj.tensor[0, layer] = keys.reshape(end - start, -1)
                memory_obj.tensor[1, layer] = values.reshape(end - start, -1)
            memory_obj.metadata.fmt = MemoryFormat.KV_2LTD

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            # What vLLM has already may be shared with running requests, which are not to be disturbed.
            skipped = min(max(kwargs.get("vllm_cached_tokens", 0) - start, 0), end - start)
            for layer, cache in enumerate(kwargs["kvcaches"]):
                blocks, offsets = self._slots(start + skipped, end, kwargs["slot_mapping"], cache.shape[2])
                parts = [memory_obj.tensor[part, layer, skipped:] for part in (0, 1)]
                both = torch.cat([part.reshape(-1, self._heads, self._size) for part in parts], dim=-1)
                cache[blocks, :, offsets] = both

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

        def get_shape(self, num_tokens: int) -> Any:
            return torch.Size([2, self._layers, num_tokens, self._heads * self._size])

    return CpuCopies


def _provide() -> None:
    from lmcache.v1 import gpu_connector

    native = gpu_connector.CreateGPUConnector
    if getattr(native, "for_cpu", False):
        return
    copies = _copy_class()

    @functools.wraps(native)
    def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        if engine.name == "VLLM" and gpu_connector.torch_device_type == "cpu":
            return copies(metadata)
        return native(config, metadata, engine, layout_hints=layout_hints)

    create.for_cpu = True  # type: ignore[attr-defined]
    gpu_connector.CreateGPUConnector = create


def install() -> None:
    """Provide the copies as soon as vLLM creates a connector: importing LMCache any earlier breaks vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    native = KVConnectorFactory.create_connector

    @functools.wraps(native)
    def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _provide()
        return native(*args, **kwargs)

    KVConnectorFactory.create_connector = classmethod(create_connector)
