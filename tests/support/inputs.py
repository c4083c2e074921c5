"""Requests with media and prompt embeddings, made of vLLM's own classes in a live engine that would not serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.engine import Engine


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        tokens: Its tokens, or None for one of embeddings alone.
        media: Its items of media: identifier, seed of its data or None, and where its placeholder begins.
        salt: The tenant's salt.
        embeds: Its prompt embeddings.
        mask: Which positions are tokens, where it mixes both.
    """

    tokens: tuple[int, ...] | None
    media: tuple[tuple[str, int | None, int], ...] = ()
    salt: str | None = None
    embeds: Any = None
    mask: tuple[bool, ...] | None = None


def _data(seed: int) -> Any:
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())})


def made(engine: Engine, name: str, ask: Ask) -> Any:
    """Return the request that the engine makes of `ask`, as its scheduler would get it."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.engine import EngineCoreRequest

    features = [
        MultiModalFeatureSpec(None if seed is None else _data(seed), "image", identifier, PlaceholderRange(at, 4))
        for identifier, seed, at in ask.media
    ]
    request, _ = engine.core.preprocess_add_request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=None if ask.tokens is None else list(ask.tokens),
            mm_features=features,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=ask.salt,
            data_parallel_rank=None,
            prompt_embeds=ask.embeds,
            prompt_is_token_ids=None if ask.mask is None else list(ask.mask),
        )
    )
    return request
