"""Functions that the engine calls in each of its workers. They raise nothing that is the adapter's or file's fault."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kvprov.engines.vllm import seams
from kvprov.engines.vllm.pins import PinnedAdapter, pins_of
from kvprov.engines.vllm.weights import loaded_weights


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker tells its engine at start.

    Attributes:
        pid: The worker's process.
        bound: Whether the seams are in effect in that process.
        weights: Identity of the weights that it loaded, or None.
        reason: Why there is none.
        packing: How it laid out the KV state of a layer.
    """

    pid: int
    bound: bool
    weights: str | None
    reason: str
    packing: str


def _packing(worker: Any) -> str:
    """Describe the order of axes of each form of layer cache, without what belongs to one process.

    The number of blocks is this process's own, the tokens of a block are the page size and the heads depend on the
    parallel shape: those are path facts, so they appear by name.
    """
    config = worker.vllm_config
    block = config.cache_config.block_size
    heads = config.model_config.get_num_kv_heads(config.parallel_config)
    forms = set()
    for layer in config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if cache is None or not hasattr(cache, "stride"):
            continue
        order = sorted(range(cache.dim()), key=lambda axis: (-cache.stride(axis), axis))
        blocks_axis = max(range(cache.dim()), key=lambda axis: cache.shape[axis])
        names = []
        for axis in order:
            size = cache.shape[axis]
            if axis == blocks_axis:
                names.append("blocks")
            elif size == block:
                names.append("tokens")
            elif size == heads:
                names.append("heads")
            else:
                names.append(str(size))
        forms.add("x".join(names))
    return "+".join(sorted(forms))


def report(worker: Any) -> WorkerReport:
    """Return what `worker` loaded and allocated."""
    loaded = loaded_weights(worker.get_model(), str(worker.vllm_config.load_config.load_format))
    return WorkerReport(
        pid=os.getpid(),
        bound=seams.installed(),
        weights=loaded.identity,
        reason=loaded.reason,
        packing=_packing(worker),
    )


def ensure_adapter(worker: Any, lora_request: Any, in_flight: frozenset[int]) -> dict[int, PinnedAdapter]:
    """See `AdapterPins.ensure`."""
    return pins_of(worker.model_runner.lora_manager).ensure(lora_request, in_flight)


def adapters(worker: Any) -> dict[int, PinnedAdapter]:
    """Return the adapters that `worker` holds, by id."""
    return pins_of(worker.model_runner.lora_manager).all()


def connector_keys(worker: Any, probes: list[Any]) -> list[str]:
    """Return the keys under which the worker's live connector would load or store `probes`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    del worker
    connector = get_kv_transfer_group()
    return [connector.kvprov_entry_key(probe) for probe in probes]
