"""The places where vLLM is made to call kvprov, and proof that they are still there.

Each seam replaces one function of vLLM by name. A release that renames one, or gives it other parameters, is found
here and refused before it serves anything; one that goes around a seam is found by the self-check.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvprov.errors import BindingError

_MARK = "_kvprov_original"
_starting = threading.local()


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of vLLM that kvprov wraps.

    Attributes:
        module: Where it is.
        name: Its name, with its class.
        parameters: The parameters that kvprov relies on, in their order.
        wrap: Makes the replacement from the original.
        by_name: Whether other modules import it by name, so that it has to be replaced there, too.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    by_name: bool = False


def _refuse(what: str) -> BindingError:
    from vllm.version import __version__

    return BindingError(
        f"vLLM {__version__} has no {what} as kvprov needs it, so keys cannot be bound.",
        "Install a release of vLLM that this release of kvprov supports (see README), or set KVPROV_MODE=off to run "
        "without any protection.",
    )


def all_seams() -> tuple[Seam, ...]:
    """Return the seams, in the order in which they are put into effect."""
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
        Seam(loader, "safetensors_weights_iterator", files, weights.wrap_safetensors_iterator),
        Seam(loader, "multi_thread_safetensors_weights_iterator", files, weights.wrap_safetensors_iterator),
        Seam(loader, "fastsafetensors_weights_iterator", files, weights.wrap_safetensors_iterator),
        Seam(loader, "instanttensor_weights_iterator", files, weights.wrap_safetensors_iterator),
        Seam(loader, "pt_weights_iterator", files, weights.wrap_pickle_iterator),
        Seam(loader, "multi_thread_pt_weights_iterator", files, weights.wrap_pickle_iterator),
        Seam(loader, "np_cache_weights_iterator", (), weights.wrap_pickle_iterator),
        Seam(manager, "WorkerLoRAManager._load_adapter", ("self", "lora_request"), pins.wrap_load_adapter),
        Seam(manager, "WorkerLoRAManager._apply_adapters", ("self", "adapter_requests"), pins.wrap_apply_adapters),
        Seam(manager, "LRUCacheWorkerLoRAManager._apply_adapters", ("self", "lora_requests"), pins.wrap_apply_adapters),
    )


def _locate(seam: Seam) -> tuple[Any, str, Any]:
    """Return the owner, the attribute's name and the attribute itself, as it stands in the owner's namespace.

    Raises:
        BindingError: The owner has no such function of its own (an inherited one is another), or one with other
            parameters.
    """
    try:
        owner: Any = importlib.import_module(seam.module)
    except ImportError as error:
        raise _refuse(f"module {seam.module}") from error
    *classes, name = seam.name.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
    attribute = None if owner is None else vars(owner).get(name)
    if attribute is None:
        raise _refuse(f"{seam.module}.{seam.name}")
    parameters = tuple(inspect.signature(_function(attribute)).parameters)
    if parameters[: len(seam.parameters)] != seam.parameters:
        raise _refuse(f"{seam.module}.{seam.name} with parameters {seam.parameters}")
    return owner, name, attribute


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, classmethod) else attribute


def install_one(seam: Seam) -> None:
    """Put one seam into effect; doing it twice changes nothing.

    Raises:
        BindingError: This vLLM lacks it.
    """
    owner, name, attribute = _locate(seam)
    is_classmethod, function = isinstance(attribute, classmethod), _function(attribute)
    if hasattr(function, _MARK):
        return
    # The original of a classmethod is called through the class, so that it sees the class as vLLM would pass it.
    replacement = seam.wrap(functools.partial(function, owner) if is_classmethod else function)
    functools.update_wrapper(replacement, function)
    setattr(replacement, _MARK, function)
    setattr(owner, name, classmethod(replacement) if is_classmethod else replacement)
    if seam.by_name:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get(name) is function:
                setattr(module, name, replacement)


_installed = False


def install() -> None:
    """Put every seam into effect in this process; doing it twice changes nothing.

    Raises:
        BindingError: This vLLM lacks a seam. Nothing is served half-bound: the engine does not start.
    """
    global _installed
    if _installed:
        return
    seams = all_seams()
    for seam in seams:
        _locate(seam)
    for seam in seams:
        install_one(seam)
    _installed = True


def installed() -> bool:
    """Whether every seam was put into effect in this process."""
    return _installed


def undone() -> list[str]:
    """Return the seams that are no longer in effect: something has replaced vLLM's function after kvprov did.

    A replacement that keeps what it wraps, as `functools.wraps` does, leaves the seam in effect.
    """
    names = []
    for seam in all_seams():
        function: Any = _function(_locate(seam)[2])
        while function is not None and not hasattr(function, _MARK):
            function = getattr(function, "__wrapped__", None)
        if function is None:
            names.append(f"{seam.module}.{seam.name}")
    return names


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
