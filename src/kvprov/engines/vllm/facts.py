"""What vLLM knows of a worker: its configuration as plain facts, before any of it becomes an identity."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvprov.contract.descriptor import Known, Unknown, Value
from kvprov.contract.errors import KvprovError
from kvprov.engines.plain import plain
from kvprov.engines.vllm.speculation import draft_weights
from kvprov.identity.kv_representation import KvRepresentation, LayerGroup, kv_representation
from kvprov.identity.model_config import model_config
from kvprov.identity.precision import Precision, precision
from kvprov.identity.remote_code import remote_code


def _precision(model: Any, adapter_dtype: str | None) -> Known:
    parameters = {
        "checkpoint": plain(getattr(model.hf_config, "quantization_config", None)),
        "engine": plain(getattr(model, "quantization_config", None)),
    }
    return precision(
        Precision(
            weight_dtype=str(model.dtype),
            compute_dtype=str(model.dtype),
            quantization=model.quantization,
            parameters=parameters,
            adapter_dtype=adapter_dtype,
        )
    )


def precision_value(vllm_config: Any) -> Value:
    """Return the value of the precision dimension."""
    lora = vllm_config.lora_config
    try:
        return _precision(vllm_config.model_config, None if lora is None else str(lora.lora_dtype))
    except KvprovError as error:
        return Unknown(f"precision: {error.message}")


def _draft(vllm_config: Any, weights: str) -> dict[str, Any]:
    """Return what is bound of a draft model, all of it in this one dimension.

    Raises:
        KvprovError: Something of it has no identity.
    """
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config
    config = model.hf_config.to_dict()
    resolved: dict[str, Any] = {"architecture": model.architecture, "max_model_len": model.max_model_len}
    if model.trust_remote_code:
        resolved["remote_code"] = remote_code(model.model, model.code_revision or model.revision, config)
    return {
        "speculative_method": str(speculative.method),
        "speculative_tokens": speculative.num_speculative_tokens,
        "draft_config": model_config(plain(config), plain(resolved)).identity,
        "draft_precision": _precision(model, None).identity,
        "draft_weights": weights,
    }


def model_config_value(vllm_config: Any, reports: list[Any], label: Known | None) -> Value:
    """Return the value of the model_config dimension.

    Args:
        vllm_config: The engine's configuration, resolved.
        reports: One report of each worker.
        label: What the operator declared for weights that cannot be identified by content; here, a draft model's.
    """
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    resolved: dict[str, Any] = {
        "architecture": model.architecture,
        "disable_sliding_window": bool(model.disable_sliding_window),
    }
    # vLLM chooses the factors of these by the length that the engine serves; the word may stand at any depth.
    if any(kind in repr(config) for kind in ("longrope", "dynamic")):
        resolved["max_model_len"] = model.max_model_len
    try:
        weights = draft_weights([report.draft for report in reports], label)
        if weights is not None:
            resolved |= _draft(vllm_config, weights)
        if model.trust_remote_code:
            resolved["remote_code"] = remote_code(model.model, model.code_revision or model.revision, config)
        return model_config(plain(config), plain(resolved))
    except KvprovError as error:
        return Unknown(f"model_config: {error.message}")


def _total_heads(vllm_config: Any, of_one_rank: int, has_draft: bool) -> int | None:
    """Return how many key-value heads a layer has on all ranks together, or None where that is not known."""
    models = [vllm_config.model_config]
    if has_draft:
        models.append(vllm_config.speculative_config.draft_model_config)
    for model in models:
        if not has_draft or model.get_num_kv_heads(vllm_config.parallel_config) == of_one_rank:
            return int(model.get_total_num_kv_heads())
    return None


def kv_representation_value(vllm_config: Any, kv_cache_config: Any, reports: list[Any]) -> Value:
    """Return the value of the kv_representation dimension.

    Args:
        vllm_config: The engine's configuration, with the layout resolved.
        kv_cache_config: The scheduler's KV cache configuration.
        reports: One report of each worker.
    """
    packings = {report.packing for report in reports}
    packing = packings.pop() if len(packings) == 1 else None
    if packing is None:
        return Unknown("kv_representation: the workers' caches have a form that is not known")
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        return Unknown("kv_representation: the KV scales are computed at run time, by each process for itself")
    has_draft = any(report.draft is not None for report in reports)
    counted: dict[LayerGroup, int] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A uniform group holds one specification for each of its layers.
        specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        for one in specs.values():
            if not hasattr(one, "num_kv_heads"):
                return Unknown(f"kv_representation: {type(one).__name__} has no key-value heads")
            heads = _total_heads(vllm_config, one.num_kv_heads, has_draft)
            if heads is None:
                return Unknown("kv_representation: a layer has the heads of neither the model nor its draft")
            form = LayerGroup(
                # A window or a chunk of attention is model_config's; the entry looks the same.
                kind="latent" if "MLA" in type(one).__name__ else "attention",
                layers=1,
                element=str(one.dtype),
                encoding=cache.cache_dtype,
                kv_heads=heads,
                head_size=one.head_size,
                head_size_v=getattr(one, "head_size_v", one.head_size),
            )
            counted[form] = counted.get(form, 0) + 1
    facts = KvRepresentation(
        groups=[dataclasses.replace(form, layers=layers) for form, layers in counted.items()],
        layout=str(cache.kv_cache_layout),
        packing=packing,
    )
    try:
        return kv_representation(facts)
    except KvprovError as error:
        return Unknown(f"kv_representation: {error.message}")


def weights_value(reports: list[Any], label: Known | None) -> Value:
    """Return the value of the weights dimension from what each worker loaded.

    Args:
        reports: One report of each worker.
        label: What the operator declared for weights that cannot be identified by content.
    """
    identities = {report.weights for report in reports}
    if len(identities) == 1 and (identity := identities.pop()) is not None:
        return Known(identity)
    if label is not None:
        return label
    reasons = sorted({report.reason for report in reports if report.reason})
    return Unknown("weights: " + ("; ".join(reasons) or "the workers loaded different weights"))
