"""The block-hash chain: native adapter and salt entries give way to one digest in the first block.

Every later block inherits it through its parent's hash. Keys made of these hashes are bound with it: vLLM's own prefix
cache, its events, and the connectors that look entries up by block hash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvprov.engines.vllm import inputs
from kvprov.engines.vllm.stamp import stamp_of

_REPLACED = frozenset({"lora", "cache_salt"})
_EMBEDDINGS = "prompt_embeds"


def wrap_extra_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `generate_block_hash_extra_keys` that binds stamped requests."""

    def bound_extra_keys(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        stamp = stamp_of(request)
        if stamp is None:
            return original(request, start_token_idx, end_token_idx, start_mm_idx)
        first = stamp.entry if start_token_idx == 0 else ()
        if not request.mm_features and request.prompt_embeds is None:
            return first or None, start_mm_idx
        native, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        kept = tuple(
            (key[0], inputs.embeddings_key(key[1], request, start_token_idx, end_token_idx))
            if key[0] == _EMBEDDINGS
            else key
            for key in native or ()
            if key[0] not in _REPLACED
        )
        return (first + kept) or None, next_mm_idx

    return bound_extra_keys
