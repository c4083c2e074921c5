"""Speculative decoding: whether entries hold state of a draft model, and what that model is.

A draft model with attention layers of its own keeps their state in the same blocks as the target's, so an entry holds
both. Drafts without a model (n-gram, suffix) and drafts without such layers (Medusa) leave entries as they are: engines
with them share with engines that do not speculate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprov.contract.descriptor import Known
from kvprov.contract.errors import KvprovError
from kvprov.engines.vllm.weights import loaded_weights


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model whose state is in the entries.

    Attributes:
        weights: Identity of its weights, or None.
        reason: Why there is none.
    """

    weights: str | None
    reason: str


def _drafter(worker: Any) -> Any:
    runner = worker.model_runner
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def draft_model(worker: Any) -> Any:
    """Return the draft model of one of vLLM's workers, or None where it has none that is known."""
    return getattr(_drafter(worker), "model", None)


def draft_of(worker: Any) -> Draft | None:
    """Return the draft model of one of vLLM's workers, or None where entries hold the target's state alone."""
    config = worker.vllm_config
    if config.speculative_config is None:
        return None
    target = {id(module) for module in worker.get_model().modules()}
    layers = [
        layer
        for layer in config.compilation_config.static_forward_context.values()
        if getattr(layer, "kv_cache", None) is not None
    ]
    if all(id(layer) in target for layer in layers):
        return None
    model = draft_model(worker)
    if model is None:
        return Draft(None, f"a {type(_drafter(worker)).__name__} keeps state, and its model is not known")
    load = config.speculative_config.draft_load_config or config.load_config
    loaded = loaded_weights(model, str(load.load_format))
    return Draft(loaded.identity, loaded.reason)


def draft_weights(drafts: Sequence[Draft | None], label: Known | None) -> str | None:
    """Return the identity of the draft model's weights, or None where entries hold no state of one.

    Args:
        drafts: What each worker says.
        label: What the operator declared for weights that cannot be identified by content.

    Raises:
        KvprovError: It is not known.
    """
    if all(draft is None for draft in drafts):
        return None
    identities = {None if draft is None else draft.weights for draft in drafts}
    if len(identities) == 1 and (identity := identities.pop()) is not None:
        return identity
    if label is not None:
        return label.identity
    reasons = sorted({draft.reason for draft in drafts if draft is not None and draft.reason})
    raise KvprovError(
        f"the draft model's weights are not identified ({'; '.join(reasons) or 'workers loaded different ones'})",
        "Declare a label for the weights.",
    )
