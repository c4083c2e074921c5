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
    "bos_token_id": _NOT_STATE,
    "chunk_size_feed_forward": _NOT_STATE,
    "embd_pdrop": "training only",
    "eos_token_id": _NOT_STATE,
    "finetuning_task": _NOT_STATE,
    "gradient_checkpointing": "training only",
    "hidden_dropout": "training only",
    "id2label": _NOT_STATE,
    "initializer_range": "training only",
    "label2id": _NOT_STATE,
    "output_attentions": _NOT_STATE,
    "output_hidden_states": _NOT_STATE,
    "pad_token_id": _NOT_STATE,
    "pretraining_tp": "training only",
    "problem_type": _NOT_STATE,
    "resid_pdrop": "training only",
    "return_dict": _NOT_STATE,
    "sep_token_id": _NOT_STATE,
    "task_specific_params": _NOT_STATE,
    "tokenizer_class": "token ids are in the key",
    "use_cache": _NOT_STATE,
}
"""Fields of a model configuration that are not bound, with the reason. Every other field is, known or not."""


def effective_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a resolved model configuration that are bound, nested configurations included.

    An absent field and one that is null are one thing: configurations of one model differ in which they write.
    """

    def effective(value: object) -> object:
        if isinstance(value, Mapping):
            return {
                str(key): effective(item)
                for key, item in value.items()
                if str(key) not in IGNORED_FIELDS and item is not None
            }
        if isinstance(value, list | tuple):
            return [effective(item) for item in value]
        return value

    result = effective(config)
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
