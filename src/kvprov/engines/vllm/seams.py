"""The places where vLLM is made to call kvprov."""

from __future__ import annotations

import threading
from typing import Any

from kvprov.engines.seams import Seam, Seams
from kvprov.errors import BindingError

_starting = threading.local()


def all_seams() -> tuple[Seam, ...]:
    """Return the seams, in the order in which they are put into effect."""
    from kvprov.engines import loading
    from kvprov.engines.vllm import chain, connectors, engine, metrics, pins, weights

    loader = "vllm.model_executor.model_loader.default_loader"
    files = ("hf_weights_files",)
    manager = "vllm.lora.worker_manager"
    statistics = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
    core = "vllm.v1.engine.core"
    return (
        Seam(
            "vllm.v1.core.kv_cache_utils",
            "generate_block_hash_extra_keys",
            ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
            chain.wrap_extra_keys,
            by_name=True,
        ),
        Seam(core, "get_request_block_hasher", ("hash_block_size", "caching_hash_fn"), engine.wrap_get_block_hasher),
        Seam(core, "EngineCore._initialize_kv_caches", ("self", "vllm_config"), engine.wrap_initialize_kv_caches),
        Seam(core, "EngineCore.add_request", ("self", "request"), engine.wrap_add_request),
        Seam(core, "EngineCore.add_lora", ("self", "lora_request"), engine.wrap_adapter_call),
        Seam(core, "EngineCore.remove_lora", ("self", "lora_id"), engine.wrap_adapter_call),
        Seam(
            core,
            "EngineCore.collective_rpc",
            ("self", "method", "timeout", "args", "kwargs"),
            engine.wrap_collective_rpc,
        ),
        Seam(core, "EngineCore.sleep", ("self", "level"), engine.wrap_sleep),
        Seam(core, "EngineCore.set_weight_version", ("self", "weight_version"), engine.wrap_set_weight_version),
        Seam("vllm.v1.worker.gpu_worker", "Worker.reload_weights", ("self",), weights.wrap_reload_weights),
        Seam(
            "vllm.distributed.kv_transfer.kv_connector.factory",
            "KVConnectorFactory.get_connector_class",
            ("cls", "kv_transfer_config"),
            connectors.wrap_get_connector_class,
        ),
        Seam("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self",), engine.wrap_schedule),
        Seam("vllm.v1.core.sched.scheduler", "Scheduler.make_stats", ("self",), metrics.wrap_make_stats),
        Seam(statistics, "KVConnectorLogging.observe", ("self", "transfer_stats_data"), metrics.wrap_log_observe),
        Seam(
            statistics,
            "KVConnectorProm.__init__",
            ("self", "vllm_config", "labelnames", "per_engine_labelvalues"),
            metrics.wrap_prom_init,
        ),
        Seam(
            statistics,
            "KVConnectorProm.observe",
            ("self", "transfer_stats_data", "engine_idx"),
            metrics.wrap_prom_observe,
        ),
        Seam(loader, "DefaultModelLoader.load_weights", ("self", "model", "model_config"), weights.wrap_load_weights),
        Seam(loader, "DefaultModelLoader._get_weights_iterator", ("self", "source"), weights.wrap_get_weights_iterator),
        Seam(loader, "safetensors_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "multi_thread_safetensors_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "fastsafetensors_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "instanttensor_weights_iterator", files, loading.wrap_safetensors_iterator),
        Seam(loader, "pt_weights_iterator", files, loading.wrap_pickle_iterator),
        Seam(loader, "multi_thread_pt_weights_iterator", files, loading.wrap_pickle_iterator),
        Seam(loader, "np_cache_weights_iterator", (), loading.wrap_pickle_iterator),
        Seam(manager, "WorkerLoRAManager._load_adapter", ("self", "lora_request"), pins.wrap_load_adapter),
        Seam(manager, "WorkerLoRAManager._apply_adapters", ("self", "adapter_requests"), pins.wrap_apply_adapters),
        Seam(manager, "LRUCacheWorkerLoRAManager._apply_adapters", ("self", "lora_requests"), pins.wrap_apply_adapters),
    )


def _version() -> str:
    from vllm.version import __version__

    return str(__version__)


SEAMS = Seams("vLLM", "vllm", _version, all_seams)


def set_starting_engine(binding: Any) -> None:
    """Note the binding of the engine that this thread is starting, for what vLLM creates without naming the engine."""
    _starting.binding = binding


def end_of_start() -> None:
    """Forget the engine that this thread was starting: it is complete."""
    _starting.binding = None


def binding_of_starting_engine() -> Any:
    """Return the binding of the engine that this thread is starting.

    Raises:
        BindingError: None is being started here, or it was not bound.
    """
    binding = getattr(_starting, "binding", None)
    if binding is None:
        raise BindingError(
            "A bound connector was created outside a bound engine.",
            "Let vLLM create the connector, with kvprov's plugin in effect.",
        )
    return binding
