"""The dimensions that kvprov knows, why each is bound, and what is left out on purpose."""

from __future__ import annotations

from typing import Final

from kvprov.contract.dimension import Dimension, Half, Kind
from kvprov.contract.registry import Registry

WEIGHTS: Final = Dimension(
    "weights",
    Half.WORKER,
    Kind.COMPUTATIONAL,
    "Keys and values are projections by the checkpoint's tensors; a name or a path says nothing of their bytes.",
)
PRECISION: Final = Dimension(
    "precision",
    Half.WORKER,
    Kind.COMPUTATIONAL,
    "Quantized weights and another compute dtype project other keys and values from the same checkpoint.",
)
MODEL_CONFIG: Final = Dimension(
    "model_config",
    Half.WORKER,
    Kind.COMPUTATIONAL,
    "Architecture, rotary base and scaling, attention window and the like shape state that the weights alone do not.",
)
KV_REPRESENTATION: Final = Dimension(
    "kv_representation",
    Half.WORKER,
    Kind.COMPUTATIONAL,
    "Bytes of one element type, head layout or memory layout mean something else when read as another.",
)
ADAPTER: Final = Dimension(
    "adapter",
    Half.REQUEST,
    Kind.COMPUTATIONAL,
    "A LoRA adapter changes the projections; its name, path and handle do not say which bytes were loaded.",
)
SHARING_DOMAIN: Final = Dimension(
    "sharing_domain",
    Half.REQUEST,
    Kind.PERMISSION,
    "A tenant's salt says who may reuse its state, even where the state would be the same.",
)
CLIENT_NAMESPACE: Final = Dimension(
    "client_namespace",
    Half.REQUEST,
    Kind.PERMISSION,
    "A client's own namespace (SGLang extra_key, LMCache tags) separates what the client wants separated.",
)

BUILT_IN: Final = Registry(
    [WEIGHTS, PRECISION, MODEL_CONFIG, KV_REPRESENTATION, ADAPTER, SHARING_DOMAIN, CLIENT_NAMESPACE]
)

NOT_BOUND: Final = {
    "kernels": "They differ in rounding. How an attention backend lays out its entries is kv_representation's.",
    "batch_shape": "What ran beside a request changes rounding only, and is not known when its key is made.",
    "tokenizer": "Keys hold token ids, the tokenizer's result; two tokenizers that agree on ids may share.",
    "engine_version": "A release that changes KV state changes model_config or kv_representation, which are bound.",
    "sampling": "Sampling acts on logits, after KV state; prompts of equal tokens have equal state.",
    "chat_template": "A template acts on text, before tokens.",
}
"""What is deliberately not a dimension, and why. Whoever wants one of them bound registers it."""
