"""Which adapter bytes a request is computed with.

Every tensor of an adapter passes `LoRAAdapter._process_weight` on its way into the engine, from a file or from a
trainer. A private copy of it is hashed and handed on, so that what is identified is what is loaded: the tensors of a
file are maps of it, and a tenant who writes to the file would change them under the engine later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvprov.contract.descriptor import ABSENT, Known, Unknown, Value
from kvprov.contract.errors import KvprovError
from kvprov.engines.plain import plain
from kvprov.engines.torch_tensors import tensor_of
from kvprov.identity.adapter import adapter_identity
from kvprov.identity.tensors import tensors_digest

_TENSORS = "_kvprov_tensors"
_IDENTITY = "_kvprov_identity"
_EVERY_MODULE = "all"
_EMBEDDING = "embed_tokens"


def wrap_process_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `LoRAAdapter._process_weight` that notes the tensor, and passes on a private copy of it."""

    def process_weight(self: Any, name: str, loaded_weight: Any) -> Any:
        private = loaded_weight.detach().to("cpu", copy=True)
        tensors = self.__dict__.setdefault(_TENSORS, [])
        try:
            tensors.append(tensor_of(name, private))
        except KvprovError as error:
            self.__dict__[_IDENTITY] = Unknown(f"adapter: {error.message}")
        return original(self, name, private)

    return process_weight


def wrap_normalize_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `LoRAAdapter._normalize_weights` that takes the tensors in the order of their names.

    Where two have one place, as `layers.0.a.o_proj` and `layers.0.b.o_proj` have, SGLang applies the one that came
    last. An identity goes by no order, so neither may what is computed.
    """

    def normalize_weights(self: Any) -> Any:
        for tensors in (*(layer.weights for layer in self.layers), self.embedding_layers):
            ordered = sorted(tensors.items(), key=lambda item: item[0])
            tensors.clear()
            tensors.update(ordered)
        return original(self)

    return normalize_weights


def _modules(names: list[str]) -> set[str]:
    """Return which modules' tensors these are: `...self_attn.q_proj.lora_A.weight` is of `q_proj`."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}


def _applied(adapter: Any, manager: Any) -> dict[str, object]:
    """Return what of the engine decides how much of `adapter` it applies.

    Tensors of modules that the adapter does not declare are applied exactly when the engine has buffers for them.
    """
    from sglang.srt.lora.utils import get_normalized_target_modules

    declared = get_normalized_target_modules(adapter.config.target_modules)
    held = get_normalized_target_modules(sorted(_modules([tensor.name for tensor in adapter.__dict__[_TENSORS]])))
    if _EVERY_MODULE not in declared and held <= declared:
        return {}
    return {"target_modules": sorted(manager.target_modules)}


def _takes_over_embeddings(adapter: Any, manager: Any) -> bool:
    """Whether SGLang computes `adapter` with another one's parts for the embedding of tokens.

    An adapter's place in memory was another one's before. SGLang clears there what the new one lacks, but for these
    parts where it has any of `embed_tokens` or `lm_head` (`LoRAMemoryPool.load_lora_weight_to_buffer`).
    """
    from sglang.srt.lora.utils import get_target_module_name

    pool = manager.memory_pool
    if not adapter.embedding_layers or _EMBEDDING not in pool.embedding_A_buffer:
        return False
    written = set()
    for name in adapter.embedding_layers:
        module, _, part = name.rpartition(".lora_")
        is_embedding = module.rpartition(".")[2] == _EMBEDDING
        if is_embedding and get_target_module_name(name, pool.target_modules) == _EMBEDDING:
            written.add(part.removeprefix("embedding_")[:1])
    return not written >= {"A", "B"}


def _identify(adapter: Any, manager: Any) -> Value:
    tensors = adapter.__dict__.get(_TENSORS)
    if not tensors:
        return Unknown("adapter: its tensors went around kvprov")
    if _takes_over_embeddings(adapter, manager):
        return Unknown(
            "adapter: it has parts for the vocabulary and none of embed_tokens, where SGLang leaves another's"
        )
    try:
        config = plain(adapter.config.hf_config)
        return Known(adapter_identity(tensors_digest(tensors), config, extra=_applied(adapter, manager)))
    except KvprovError as error:
        return Unknown(f"adapter: {error.message}")
    except (TypeError, ValueError, AttributeError) as error:
        # What a tenant wrote into the configuration is handed to SGLang's own code.
        return Unknown(f"adapter: its configuration has no meaning ({type(error).__name__})")


def adapter_value(manager: Any, lora_id: str | None) -> Value:
    """Return the value of the adapter dimension.

    Args:
        manager: SGLang's `LoRAManager`, or None where the engine has no adapters.
        lora_id: The handle of the adapter that a request names, or None. SGLang never gives a handle to other bytes.
    """
    if lora_id is None:
        return ABSENT
    adapter = None if manager is None else manager.loras.get(lora_id)
    if adapter is None:
        return Unknown("adapter: this worker does not hold it")
    value: Value | None = adapter.__dict__.get(_IDENTITY)
    if value is None:
        value = _identify(adapter, manager)
        adapter.__dict__[_IDENTITY] = value
    return value
