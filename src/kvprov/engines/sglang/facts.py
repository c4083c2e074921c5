"""What SGLang knows of a worker: its configuration as plain facts, before any of it becomes an identity."""

from __future__ import annotations

from typing import Any, Final

from kvprov.contract.descriptor import Known, Unknown, Value
from kvprov.contract.errors import KvprovError
from kvprov.engines.loading import LoadedWeights
from kvprov.engines.plain import plain
from kvprov.engines.sglang import weights
from kvprov.identity.kv_representation import KvRepresentation, LayerGroup, kv_representation
from kvprov.identity.model_config import effective_config, model_config
from kvprov.identity.precision import Precision, precision
from kvprov.identity.remote_code import remote_code

_SERVED_LENGTH: Final = "context_len"


def _quantization(model: Any) -> Any:
    """Return the parameters of the object that quantizes `model`: what of it is a plain fact, and what it is."""
    config = getattr(model, "quant_config", None)
    if config is None:
        return None
    found: dict[str, Any] = {"class": f"{type(config).__module__}.{type(config).__qualname__}"}
    for name, value in vars(config).items():
        try:
            found[name] = plain(value)
        except KvprovError:
            # Methods and tables that follow from the rest.
            found[name] = f"{type(value).__module__}.{type(value).__qualname__}"
    return found


def precision_value(server_args: Any, config: Any, model: Any) -> Value:
    """Return the value of the precision dimension.

    Args:
        server_args: SGLang's `ServerArgs`.
        config: SGLang's `ModelConfig`.
        model: The model, as loaded.
    """
    # torchao quantizes linear layers beside the method that the checkpoint names.
    torchao = getattr(server_args, "torchao_config", "") or None
    try:
        parameters = {
            "checkpoint": plain(getattr(config.hf_config, "quantization_config", None)),
            "engine": _quantization(model),
            "torchao": torchao,
        }
        method = config.quantization or ("torchao" if torchao else None)
        return precision(Precision(str(config.dtype), str(config.dtype), method, parameters))
    except KvprovError as error:
        return Unknown(f"precision: {error.message}")


def _drafts(server_args: Any, label: Known | None) -> dict[str, Any]:
    """Return what is bound of a draft model: entries may hold its state, too.

    Raises:
        KvprovError: It has no identity.
    """
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if algorithm is None:
        return {}
    loaded = weights.drafts()
    unknown = [one.reason for one in loaded if one.identity is None]
    if not loaded and getattr(server_args, "speculative_draft_model_path", None):
        unknown = ["its load format is not followed"]
    if unknown and label is None:
        raise KvprovError(f"A draft model has no identity: {unknown[0]}.", "Declare KVPROV_WEIGHTS_LABEL.")
    return {
        "speculative_algorithm": str(algorithm),
        "draft_weights": [label.identity] if unknown and label is not None else [one.identity for one in loaded],
    }


def model_config_value(server_args: Any, config: Any, model: Any, label: Known | None) -> Value:
    """Return the value of the model_config dimension.

    Args:
        server_args: SGLang's `ServerArgs`.
        config: SGLang's `ModelConfig`.
        model: The model, as loaded.
        label: What the operator declared for weights that cannot be identified by content; here, a draft model's.
    """
    resolved: dict[str, Any] = {
        "architecture": type(model).__name__,
        "sliding_window_size": config.sliding_window_size,
        "attention_chunk_size": config.attention_chunk_size,
    }
    try:
        # SGLang notes there how long a context it serves. By itself that shapes nothing.
        fields = {name: item for name, item in config.hf_config.to_dict().items() if name != _SERVED_LENGTH}
        bound = effective_config(plain(fields))
        # The factors of these are chosen by it; the word may stand at any depth, but the checkpoint's path is no such.
        if any(kind in repr(bound) for kind in ("longrope", "dynamic")):
            resolved[_SERVED_LENGTH] = config.context_len
        resolved |= _drafts(server_args, label)
        if server_args.trust_remote_code:
            resolved["remote_code"] = remote_code(config.model_path, config.revision, fields)
        return model_config(bound, plain(resolved))
    except KvprovError as error:
        return Unknown(f"model_config: {error.message}")


def _groups(pool: Any, config: Any) -> list[LayerGroup]:
    """Return the forms of the layers in a pool.

    Raises:
        KvprovError: The pool's form is not known.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if type(pool) is SWAKVPool:
        return [*_groups(pool.full_kv_pool, config), *_groups(pool.swa_kv_pool, config)]
    element, encoding = str(pool.store_dtype), str(pool.dtype)
    if type(pool) is MHATokenToKVPool:
        heads = config.get_total_num_kv_heads()
        return [LayerGroup("attention", pool.layer_num, element, encoding, heads, pool.head_dim, pool.v_head_dim)]
    if type(pool) is MLATokenToKVPool:
        width = pool.kv_lora_rank + pool.qk_rope_head_dim
        return [LayerGroup("latent", pool.layer_num, element, encoding, 1, width, pool.kv_lora_rank)]
    raise KvprovError(
        f"The KV cache is a {type(pool).__name__}, whose form is not known.",
        "Use a release of kvprov that knows it; until then requests bypass the shared tier.",
    )


def kv_representation_value(server_args: Any, config: Any, pool: Any, tree_cache: Any) -> Value:
    """Return the value of the kv_representation dimension.

    Args:
        server_args: SGLang's `ServerArgs`.
        config: SGLang's `ModelConfig`.
        pool: The device's KV pool.
        tree_cache: The prefix cache, with the host's pool below it.
    """
    if getattr(server_args, "quantization_param_path", None):
        return Unknown("kv_representation: KV scales are read from a file, which is not identified")
    controller = getattr(tree_cache, "cache_controller", None)
    host = getattr(controller, "mem_pool_host", None)
    layout = getattr(host, "layout", None) or getattr(server_args, "hicache_mem_layout", "device")
    try:
        facts = KvRepresentation(_groups(pool, config), str(layout), f"page:{tree_cache.page_size}")
        return kv_representation(facts)
    except KvprovError as error:
        return Unknown(f"kv_representation: {error.message}")


def weights_value(loaded: LoadedWeights, label: Known | None) -> Value:
    """Return the value of the weights dimension.

    Args:
        loaded: What the worker loaded.
        label: What the operator declared for weights that cannot be identified by content.
    """
    if loaded.identity is not None:
        return Known(loaded.identity)
    return label or Unknown(f"weights: {loaded.reason}")
