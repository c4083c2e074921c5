"""vLLM's own objects for a scenario: configuration, cache configuration, connector and request. No model is loaded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvprov.check.audit.materials import HEAD_SIZE, HEADS, LAYERS, Materials
from kvprov.check.audit.scenario import Scenario
from kvprov.check.audit.subject import NotApplicableError

BLOCK: Final = 32
PROMPT_TOKENS: Final = 2 * BLOCK + 6
"""Two whole blocks, and a rest: what is true of the first key must be true of a later one."""

TAG: Final = "lmcache.tag.audit"
"""The one place in a request of vLLM's where a client opens a namespace of its own: LMCache reads such tags."""

_LAYOUTS: Final = {"HND": "LBHNC", "NHD": "LBNHC"}

Spell = Callable[[Any, Any], Sequence[str]]
"""Returns the keys that a connector asks its store for, given the connector and a request."""


class Noticed(dict[str, Any]):
    """A client's parameters, which notice whether anything reads the tag.

    Attributes:
        read: Whether something on the way to keys has. What has not cannot depend on it.
    """

    def __init__(self, value: str) -> None:
        super().__init__({TAG: value})
        self.read = False

    def __getitem__(self, name: str) -> Any:
        self.read = self.read or name == TAG
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a member."""
        self.read = self.read or name == TAG
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return super().__iter__()

    def items(self) -> Any:
        """Return all members."""
        self.read = True
        return super().items()

    def keys(self) -> Any:
        """Return all names."""
        self.read = True
        return super().keys()

    def values(self) -> Any:
        """Return all values."""
        self.read = True
        return super().values()

    def copy(self) -> dict[str, Any]:
        """Return a copy."""
        self.read = True
        return super().copy()


class World:
    """Makes vLLM's objects, each worker's once.

    Args:
        root: A folder for files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.materials = Materials(root)
        self._numbers = itertools.count()
        self._configs: dict[Scenario, tuple[Any, Any]] = {}
        # Until the process ends: some, collected, would wait for messages to be sent that nobody receives.
        self._connectors: list[Any] = []

    def configs(self, scenario: Scenario) -> tuple[Any, Any]:
        """Return the configuration of the engine, resolved as it resolves it, and that of its KV cache."""
        worker = scenario.worker()
        model = self.materials.model(scenario)
        if worker not in self._configs:
            self._configs[worker] = self._made(worker, model)
        return self._configs[worker]

    def _made(self, worker: Scenario, model: Path) -> tuple[Any, Any]:
        from vllm.engine.arg_utils import EngineArgs

        arguments = EngineArgs(
            model=str(model),
            served_model_name=worker.served_name,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=worker.compute_dtype,
            quantization=worker.quantization or None,
            kv_cache_dtype=worker.kv_element,
            max_model_len=512,
            block_size=BLOCK,
            enable_lora=True,
            max_lora_rank=8,
            kv_cache_memory_bytes=1 << 24,
            disable_hybrid_kv_cache_manager=True,
            load_format="safetensors",
        )
        config = arguments.create_engine_config()
        config.cache_config.kv_cache_layout = _LAYOUTS[worker.kv_layout]
        return config, _cache_config(config)

    def connector(self, scenario: Scenario, name: str, extra: Mapping[str, Any]) -> Any:
        """Return the scheduler half of a connector, as vLLM makes it."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        made, cache = self.configs(scenario)
        config = copy.copy(made)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_extra_config=dict(extra)
        )
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
        self._connectors.append(connector)
        return connector

    def request(self, scenario: Scenario, before: Callable[[Any], None] | None = None) -> Any:
        """Return the scenario's request, with its block hashes.

        Args:
            scenario: The scenario.
            before: Called with the request before it is hashed.
        """
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        adapter = scenario.adapter
        lora = adapter and LoRARequest(adapter.name, adapter.handle, str(self.materials.adapter(adapter)))
        said = Noticed(scenario.namespace) if scenario.namespace else None
        first = 1 + scenario.prompt
        request = Request(
            request_id=f"audit-{next(self._numbers)}",
            prompt_token_ids=list(range(first, first + PROMPT_TOKENS)),
            sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said} if said else None),
            pooling_params=None,
            lora_request=lora,
            cache_salt=scenario.salt or None,
        )
        if said is not None:
            # Whatever vLLM did to make the request is no use of the tag.
            said.read = False
        if before is not None:
            before(request)
        request.block_hashes = _block_hasher()(request)
        return request


def _block_hasher() -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name("sha256")
    if getattr(kv_cache_utils, "NONE_HASH", None) is None:
        kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(BLOCK, function)


def _cache_config(config: Any) -> Any:
    import torch
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    element = config.cache_config.cache_dtype
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=getattr(torch, str(element))
    )
    layers = {f"model.layers.{layer}.self_attn.attn": spec for layer in range(LAYERS)}
    return generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [layers], [1 << 24]))


class KeysOf:
    """A key function: the keys that one connector asks its store for.

    Args:
        world: Makes the objects.
        name: The connector.
        extra: Its configuration.
        spell: Returns what it asks for.
        stamp: Called with a scenario and its request before it is hashed; None for stock vLLM.
        start: Called with a scenario before a connector is made for it; None for stock vLLM.
        close: Called with a connector that is not needed any more.
    """

    def __init__(
        self,
        world: World,
        name: str,
        extra: Mapping[str, Any],
        spell: Spell,
        stamp: Callable[[Scenario, Any], None] | None = None,
        start: Callable[[Scenario], None] | None = None,
        *,
        close: Callable[[Any], None],
    ) -> None:
        self._world = world
        self._name = name
        self._extra = extra
        self._spell = spell
        self._stamp = stamp
        self._start = start
        self._close = close
        self._latest: tuple[Scenario, Any] | None = None

    def __call__(self, scenario: Scenario) -> list[bytes]:
        """Return the keys of a scenario's entries."""
        connector = self._connector(scenario)
        stamp = self._stamp
        request = self._world.request(scenario, (lambda r: stamp(scenario, r)) if stamp is not None else None)
        said = request.kv_transfer_params
        keys = [key.encode() for key in self._spell(connector, request)]
        if said is not None and not said.read:
            # Nothing on the way to the keys has looked at it.
            raise NotApplicableError("client_namespace")
        return keys

    def _connector(self, scenario: Scenario) -> Any:
        worker = scenario.worker()
        if self._latest is None or self._latest[0] != worker:
            if self._latest is not None:
                self._close(self._latest[1])
            self._world.materials.model(scenario)
            if self._start is not None:
                self._start(scenario)
            self._latest = (worker, self._world.connector(scenario, self._name, self._extra))
        return self._latest[1]
