"""SGLang's own objects for a scenario: arguments, request, storage configuration and backend. No model is loaded."""

from __future__ import annotations

import inspect
import itertools
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvprov.check.audit.materials import Materials
from kvprov.check.audit.scenario import Scenario

PAGE: Final = 16
PROMPT_TOKENS: Final = 2 * PAGE
LAYOUTS: Final = {"HND": "layer_first", "NHD": "page_first"}
ELEMENTS: Final = {"bfloat16": "bfloat16", "float16": "fp8_e5m2"}
"""What SGLang can make a KV cache of, for the scenario's two element types."""
_QUANTIZATION: Final = "w8a8_int8"

Spell = Callable[[Any, list[str]], list[str]]
"""Returns the names under which a backend keeps pages, given the backend and the pages' hashes."""


class World:
    """Makes SGLang's objects, each worker's once.

    Args:
        root: A folder for files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.materials = Materials(root)
        self._numbers = itertools.count()
        self._arguments: dict[Scenario, Any] = {}

    def arguments(self, scenario: Scenario) -> Any:
        """Return the worker's `ServerArgs`."""
        worker = scenario.worker()
        model = self.materials.model(scenario)
        if worker not in self._arguments:
            from sglang.srt.server_args import ServerArgs

            self._arguments[worker] = ServerArgs(
                model_path=str(model),
                served_model_name=worker.served_name,
                dtype=worker.compute_dtype,
                quantization=_QUANTIZATION if worker.quantization else None,
                kv_cache_dtype=ELEMENTS[worker.kv_element],
                page_size=PAGE,
                device="cpu",
                attention_backend="torch_native",
                sampling_backend="pytorch",
                grammar_backend="none",
                disable_cuda_graph=True,
                skip_server_warmup=True,
                skip_tokenizer_init=True,
                mem_fraction_static=0.1,
                enable_hierarchical_cache=True,
                hicache_mem_layout=LAYOUTS[worker.kv_layout],
                hicache_io_backend="direct",
                hicache_storage_backend="file",
            )
        return self._arguments[worker]

    def lora_id(self, scenario: Scenario) -> str | None:
        """Return the handle of the scenario's adapter, as SGLang gives it one that it is started with."""
        if scenario.adapter is None:
            return None
        from sglang.srt.lora.lora_registry import LoRARef

        return str(LoRARef.deterministic_id(scenario.adapter.name, str(self.materials.adapter(scenario.adapter))))

    def request(self, scenario: Scenario) -> Any:
        """Return the scenario's request, as the scheduler makes it of what the client sent."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        first = 1 + scenario.prompt
        return Req(
            rid=f"audit-{next(self._numbers)}",
            origin_input_text="",
            origin_input_ids=array("q", range(first, first + PROMPT_TOKENS)),
            sampling_params=SamplingParams(max_new_tokens=1),
            extra_key=scenario.namespace or None,
            cache_salt=scenario.salt or None,
            lora_id=self.lora_id(scenario),
        )

    def backend(self, scenario: Scenario, name: str, extra: dict[str, Any]) -> Any:
        """Return a storage backend, as the cache controller opens it."""
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        arguments = self.arguments(scenario)
        host = SimpleNamespace(
            layout=arguments.hicache_mem_layout, dtype=arguments.kv_cache_dtype, storage_format_tag=None
        )
        controller = SimpleNamespace(
            mem_pool_device=SimpleNamespace(dtype=arguments.kv_cache_dtype),
            mem_pool_host=host,
            storage_host_pool=host,
            enable_storage_metrics=False,
            page_size=PAGE,
            get_attn_cp_rank_and_size=lambda: (0, 1),
        )
        config = HiCacheController._generate_storage_config(controller, arguments.served_model_name, dict(extra))
        return StorageBackendFactory.create_backend(name, config, host)


def prepare() -> None:
    """Let the controller's configuration be made without ranks."""
    from sglang.srt.managers import cache_controller

    alone = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_dp_rank=0)
    alone.attn_dcp_size, alone.attn_dcp_rank = 1, 0
    cache_controller.get_parallel = lambda: alone
    cache_controller.is_dp_attention_enabled = lambda: False
    _forget_configurations()


def _forget_configurations() -> None:
    """Let a model's configuration be read each time. SGLang remembers it by path, where an engine has one model."""
    from sglang.srt.configs import model_config

    remembering: Any = vars(model_config)["get_config"]
    reading = inspect.unwrap(remembering)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get("get_config") is remembering:
            vars(module)["get_config"] = reading


def page_hashes(request: Any) -> list[str]:
    """Return the hashes of a request's pages: as SGLang makes them where it looks them up."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(array("q", request.origin_input_ids), extra_key=request.extra_key, cache_salt=request.cache_salt)
    return list(get_storage_hash_str(key, page_size=PAGE))


class KeysOf:
    """A key function: the names of a request's pages in one backend.

    Args:
        world: Makes the objects.
        backend: The backend's name.
        extra: Its extra configuration.
        spell: Returns names of pages.
        start: Called with a scenario before anything is made of it; None for stock SGLang.
    """

    def __init__(
        self,
        world: World,
        backend: str,
        extra: dict[str, Any],
        spell: Spell,
        start: Callable[[Scenario], None] | None = None,
    ) -> None:
        self._world = world
        self._backend = backend
        self._extra = extra
        self._spell = spell
        self._start = start
        self._latest: tuple[Scenario, Any] | None = None

    def __call__(self, scenario: Scenario) -> list[bytes]:
        """Return the names of a scenario's pages."""
        worker = scenario.worker()
        self._world.materials.model(scenario)
        if self._start is not None:
            self._start(scenario)
        if self._latest is None or self._latest[0] != worker:
            self._latest = (worker, self._world.backend(scenario, self._backend, self._extra))
        return [name.encode() for name in self._spell(self._latest[1], page_hashes(self._world.request(scenario)))]
