"""The model_config dimension: what shapes KV state beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvprov.contract.descriptor import Known
from kvprov.identity.canonical import config_identity

_NOT_STATE = "says nothing of the computation of keys and values"

IGNORED_FIELDS: Final[Mapping[str, str]] = {
    # Owned by another dimension: each fact belongs to exactly one, so that one can be varied alone.
    "dtype": "owned by precision",
    "torch_dtype": "owned by precision",
    "quantization_config": "owned by precision",
    "compression_config": "owned by precision",
    "num_key_value_heads": "owned by kv_representation",
    "num_hidden_layers": "owned by kv_representation",
    "head_dim": "owned by kv_representation",
    # Names and provenance of the file, not of the model.
    "_name_or_path": "a name; weights are identified by content",
    "name_or_path": "a name; weights are identified by content",
    "_commit_hash": "a name; weights are identified by content",
    "transformers_version": "who wrote the file",
    "_attn_implementation": "a choice of kernel, which is not bound",
    "_attn_implementation_internal": "a choice of kernel, which is not bound",
    "attn_implementation": "a choice of kernel, which is not bound",
    # Sampling, training and output options of the configuration file.
    "architectures": "resolved to the class that the engine runs, which is bound as `architecture`",
    "attention_dropout": "training only",
    "chunk_size_feed_forward": _NOT_STATE,
    "embd_pdrop": "training only",
    "finetuning_task": _NOT_STATE,
    "gradient_checkpointing": "training only",
    "hidden_dropout": "training only",
    "id2label": _NOT_STATE,
    "label2id": _NOT_STATE,
    "output_attentions": _NOT_STATE,
    "output_hidden_states": _NOT_STATE,
    "pretraining_tp": "training only",
    "problem_type": _NOT_STATE,
    "resid_pdrop": "training only",
    "return_dict": _NOT_STATE,
    "task_specific_params": _NOT_STATE,
    "tokenizer_class": "token ids are in the key",
    "use_cache": _NOT_STATE,
}
"""Fields of a model configuration that are not bound, with the reason. Every other field is, known or not."""

_LANGUAGE_MODEL: Final = "text_config"
_NOT_OWNED_BELOW: Final = frozenset({"architectures", "quantization_config", "compression_config"})
_NOT_OWNED_ELSEWHERE: Final = _NOT_OWNED_BELOW | {
    "dtype",
    "torch_dtype",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
}
"""What the owners of a fact read: the top level, and some of the nested language model. A vision tower's layers, say,
are nobody else's, so there they are bound."""


def effective_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a resolved model configuration that are bound, nested configurations included.

    An absent field and one that is null are one thing: configurations of one model differ in which they write.
    """

    def effective(value: object, bound_here: frozenset[str]) -> object:
        if isinstance(value, Mapping):
            return {
                str(key): effective(
                    item, _NOT_OWNED_BELOW if key == _LANGUAGE_MODEL and not bound_here else _NOT_OWNED_ELSEWHERE
                )
                for key, item in value.items()
                if item is not None and (str(key) not in IGNORED_FIELDS or str(key) in bound_here)
            }
        if isinstance(value, list | tuple):
            return [effective(item, bound_here) for item in value]
        return value

    result = effective(config, frozenset())
    assert isinstance(result, dict)
    return result


def model_config(config: Mapping[str, object], resolved: Mapping[str, object] = {}) -> Known:
    """Return the identity of a resolved model configuration.

    Args:
        config: The configuration as a mapping (`config.json` with the engine's overrides applied).
        resolved: What the engine decided beside it: the class that it runs, remote code, a speculative draft.

    Raises:
        KvprovError: A value has no canonical form.
    """
    return Known(config_identity({"config": effective_config(config), "resolved": effective_config(resolved)}))
