"""Engine side: attaches a binding when an engine starts, and keeps it true while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvprov.engines.vllm import connectors, metrics, seams, selfcheck, updates
from kvprov.engines.vllm.adapters import Unfinished
from kvprov.engines.vllm.binding import EngineBinding

_ATTRIBUTE = "_kvprov_binding"
_UPDATES = "_kvprov_weight_updates"


def _binding_of(engine: Any) -> EngineBinding | None:
    return getattr(engine, _ATTRIBUTE, None)


def wrap_initialize_kv_caches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore._initialize_kv_caches` that attaches a binding.

    It runs once per engine, after the workers have loaded the model and before the scheduler makes its connector; and
    it is looked up on the class, so that it works although vLLM loads plugins inside `EngineCore.__init__`.
    """

    def initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        connectors.check_encoder_tier(vllm_config)
        kv_cache_config = original(self, vllm_config)
        binding = EngineBinding(vllm_config, kv_cache_config, self.model_executor)
        setattr(self, _ATTRIBUTE, binding)
        setattr(self, _UPDATES, updates.WeightUpdates(binding, _unfinished(self)))
        binding.engine = self
        seams.set_starting_engine(binding)
        if vllm_config.kv_transfer_config is not None:
            connectors.check_block_hash(vllm_config.cache_config.prefix_caching_hash_algo)
        elif not vllm_config.cache_config.enable_prefix_caching:
            # Nothing is keyed, so vLLM makes no block hasher, and there is nothing to check.
            binding.announce("none")
            seams.end_of_start()
        return kv_cache_config

    return initialize_kv_caches


def wrap_get_block_hasher(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_request_block_hasher` whose hasher binds, once the engine's keys have passed the self-check."""

    def get_block_hasher(hash_block_size: int, caching_hash_fn: Any) -> Any:
        binding = seams.binding_of_starting_engine()
        hasher = binding.hasher(original(hash_block_size, caching_hash_fn))
        connector = selfcheck.check(binding, hasher, hash_block_size)
        if binding.connector() is not None:
            metrics.attach(binding.engine.scheduler, binding.bypasses)
        setattr(binding.engine.scheduler, _UPDATES, _updates_of(binding.engine))
        binding.announce(connector)
        seams.end_of_start()
        return hasher

    return get_block_hasher


def _updates_of(engine: Any) -> updates.WeightUpdates:
    found: updates.WeightUpdates = getattr(engine, _UPDATES)
    return found


def _unfinished(engine: Any) -> Unfinished:
    # Asked for only when something was exchanged: a list for each request would cost more the more there are.
    return lambda: list(engine.scheduler.requests.values())


def wrap_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore.add_request` that settles the request's adapter first."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        binding = _binding_of(self)
        if binding is not None:
            _updates_of(self).look()
            binding.admit(request, _unfinished(self))
        return original(self, request, *args, **kwargs)

    return add_request


def wrap_adapter_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `EngineCore` that loads or removes adapters, and reads afterwards what the workers hold."""

    def adapter_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            binding = _binding_of(self)
            if binding is not None:
                binding.resync_adapters(_unfinished(self))

    return adapter_call


def wrap_collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore.collective_rpc` that notices calls which may exchange adapters or weights."""

    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        binding = _binding_of(self)
        if binding is None:
            return original(self, method, timeout, args, kwargs)
        keeps = updates.keeps_weights(method, args or (), kwargs or {})
        try:
            return _updates_of(self).call(
                method, args or (), kwargs or {}, lambda: original(self, method, timeout, args, kwargs)
            )
        finally:
            if not keeps or "lora" in method:
                binding.resync_adapters(_unfinished(self))

    return collective_rpc


def wrap_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler.schedule` that notices weights which were exchanged since the last step."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch: updates.WeightUpdates | None = getattr(self, _UPDATES, None)
        if watch is not None:
            watch.look()
        return original(self, *args, **kwargs)

    return schedule


def wrap_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore.sleep` that notices when the weights are dropped."""

    def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if _binding_of(self) is not None:
            _updates_of(self).sleep(level)
        return original(self, level, *args, **kwargs)

    return sleep


def wrap_set_weight_version(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineCore.set_weight_version` that takes the version for the weights' identity, where it is trusted."""

    def set_weight_version(self: Any, weight_version: str) -> Any:
        result = original(self, weight_version)
        if _binding_of(self) is not None:
            _updates_of(self).declared(weight_version)
        return result

    return set_weight_version
