"""Functions that the engine calls in each of its workers. They raise nothing that is the adapter's or file's fault."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kvprov.engines.vllm import quirks
from kvprov.engines.vllm.pins import PinnedAdapter, pins_of
from kvprov.engines.vllm.seams import SEAMS
from kvprov.engines.vllm.speculation import Draft, draft_model, draft_of
from kvprov.engines.vllm.weights import count_direct_loads, loaded_weights


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker tells its engine at start.

    Attributes:
        pid: The worker's process.
        bound: Whether the seams were put into effect in that process.
        undone: Those that are not any more.
        weights: Identity of the weights that it loaded, or None.
        reason: Why there is none.
        packing: How it laid out the KV state of a layer, or None where that is not known.
        draft: The draft model whose state is in its entries, or None.
    """

    pid: int
    bound: bool
    undone: list[str]
    weights: str | None
    reason: str
    packing: str | None
    draft: Draft | None


def _packing(worker: Any) -> str | None:
    """Describe each form of layer cache, or return None where the form is not known.

    vLLM views a layer's cache as blocks x heads x tokens x content, whatever the order in memory, which is its layout
    and bound by name. Blocks are this process's own and heads a matter of the parallel shape.
    """
    forms = set()
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if cache is None:
            continue
        if not hasattr(cache, "dim") or cache.dim() != 4:
            return None
        forms.add(quirks.block_form(layer, cache, worker.vllm_config))
    return "+".join(sorted(forms))


def models(worker: Any) -> list[Any]:
    """Return the models that `worker` computes with: for an engine in the same process, which can look at them."""
    draft = draft_model(worker)
    return [worker.get_model(), *([] if draft is None else [draft])]


def report(worker: Any) -> WorkerReport:
    """Return what `worker` loaded and allocated, and begin to notice who gives its models other weights."""
    for model in models(worker):
        count_direct_loads(model)
    loaded = loaded_weights(worker.get_model(), str(worker.vllm_config.load_config.load_format))
    return WorkerReport(
        pid=os.getpid(),
        bound=SEAMS.installed,
        undone=SEAMS.undone() if SEAMS.installed else [],
        weights=loaded.identity,
        reason=loaded.reason,
        packing=_packing(worker),
        draft=draft_of(worker),
    )


def ensure_adapter(worker: Any, lora_request: Any, in_flight: frozenset[int]) -> dict[int, PinnedAdapter]:
    """See `AdapterPins.ensure`."""
    return pins_of(worker.model_runner.lora_manager).ensure(lora_request, in_flight)


def adapters(worker: Any) -> dict[int, PinnedAdapter]:
    """Return the adapters that `worker` holds, by id."""
    return pins_of(worker.model_runner.lora_manager).all()


def connector_keys(worker: Any, index: int, entries: list[Any]) -> list[str]:
    """Return the keys under which the worker's live connector would load or store `entries`.

    Args:
        worker: One of vLLM's workers.
        index: Which of several connectors, in their order.
        entries: What the scheduler half would send.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvprov.engines.vllm.multi import leaves

    del worker
    connector = list(leaves(get_kv_transfer_group()))[index]
    return [connector.kvprov_entry_key(entry) for entry in entries]
