"""What this release of vLLM does on some platforms, and what it means for provenance."""

from __future__ import annotations

from typing import Any


def block_form(layer: Any, cache: Any, vllm_config: Any) -> str:
    """Describe how an attention layer's backend lays out a block of its cache.

    Args:
        layer: One of vLLM's attention layers.
        cache: Its cache, viewed as blocks x heads x tokens x content.
        vllm_config: The engine's configuration.

    Backends may pack a whole block in an order of their own behind vLLM's view of it, so both the backend and the
    tokens of a block belong to the form. The CPU's backend (vLLM 0.32, `cpu_attn.py`) also packs by instruction set.
    """
    tokens, content = cache.shape[2], cache.shape[3]
    backend = getattr(layer, "attn_backend", None)
    name = "none" if backend is None else str(backend.get_name())
    if name == "CPU_ATTN":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(vllm_config.model_config.dtype, tokens, content // 2, vllm_config.cache_config.cache_dtype)
        name = f"{name}/{isa}"
    return f"{type(layer).__name__}:{name}:{tokens}:{content}"


def mixes_adapters(vllm_config: Any) -> bool:
    """Whether a request without an adapter may be computed with that of another one in its batch.

    On CPU, vLLM 0.32 takes the adapters of a batch by index, and -1, which stands for none, is the last one
    (`lora/ops/torch_ops/lora_ops.py`).
    """
    from vllm.platforms import current_platform

    return vllm_config.lora_config is not None and bool(current_platform.is_cpu())
