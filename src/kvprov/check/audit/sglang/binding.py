"""kvprov's own binding for a scenario's worker, with what its engine would have loaded of the scenario's files.

`kvprov.engines.sglang` binds a scheduler. Here it is given one that has loaded nothing: arguments, model configuration
and pool are SGLang's own, and what it would find of weights and adapters is identified from the files.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvprov.check.audit.materials import HEAD_SIZE, HEADS, LAYERS
from kvprov.check.audit.scenario import Adapter, Scenario
from kvprov.check.audit.sglang.world import PAGE, World
from kvprov.contract.descriptor import ABSENT, Known, Value
from kvprov.identity.adapter import identify_adapter
from kvprov.identity.files import open_file
from kvprov.identity.tensors import hash_file, tensors_digest, tensors_identity


class Binder:
    """Puts the binding of a scenario's worker in effect.

    Args:
        world: Makes SGLang's objects.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._bindings: dict[Scenario, Any] = {}
        self._adapters: dict[str, Adapter] = {}

    def start(self, scenario: Scenario) -> None:
        """Let requests that are made from now on be requests of the scenario's worker."""
        from kvprov.engines.loading import LoadedWeights
        from kvprov.engines.sglang import binding, current

        if scenario.adapter is not None:
            self._adapters[str(self._world.lora_id(scenario))] = scenario.adapter
        worker = scenario.worker()
        if worker not in self._bindings:
            with open_file(self._world.materials.model(scenario) / "model.safetensors") as file:
                weights = tensors_identity(tensors_digest(hash_file(file)))
            found = LoadedWeights(weights, "")
            # What it would have found in the engine's memory.
            vars(binding).update(loaded_weights=lambda _model: found, adapter_value=self._adapter_value)
            self._bindings[worker] = binding.SchedulerBinding(self._scheduler(scenario))
        current.set_running(self._bindings[worker], None)  # type: ignore[arg-type]

    def _adapter_value(self, _manager: Any, lora_id: str | None) -> Value:
        if lora_id is None:
            return ABSENT
        return Known(identify_adapter(self._world.materials.adapter(self._adapters[lora_id])).identity)

    def _scheduler(self, scenario: Scenario) -> Any:
        import torch
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        arguments = self._world.arguments(scenario)
        element = torch.float8_e5m2 if "fp8" in arguments.kv_cache_dtype else torch.bfloat16
        pool = MHATokenToKVPool(
            size=2 * PAGE,
            page_size=PAGE,
            dtype=element,
            head_num=HEADS,
            head_dim=HEAD_SIZE,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        manager = SimpleNamespace(lora_refs={})
        runner = SimpleNamespace(model=SimpleNamespace(quant_config=None), lora_manager=manager)
        host = SimpleNamespace(layout=arguments.hicache_mem_layout)
        return SimpleNamespace(
            server_args=arguments,
            model_config=ModelConfig.from_server_args(arguments),
            tp_worker=SimpleNamespace(model_runner=runner),
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            tree_cache=SimpleNamespace(cache_controller=SimpleNamespace(mem_pool_host=host), page_size=PAGE),
        )
