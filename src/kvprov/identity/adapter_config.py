"""Which fields of a PEFT configuration shape KV state, in one form for equal meanings.

Source: `LoraConfig` of PEFT 0.21 and what vLLM 0.32 reads of it (`vllm/lora/peft_helper.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvprov.errors import KvprovError, UnreadableContentError
from kvprov.identity.canonical import canonical_json

IGNORED_FIELDS: Final = {
    "base_model_name_or_path": "A name for the base model, whose content is the weights dimension.",
    "revision": "A name for a version of the base model, whose content is the weights dimension.",
    "inference_mode": "Whether PEFT freezes the adapter for training.",
    "lora_dropout": "Dropout acts in training only.",
    "task_type": "Which class PEFT wraps around the model; the tensors say what a head holds.",
    "auto_mapping": "Which class PEFT would import for the base model.",
    "peft_version": "Which release wrote the file.",
    "megatron_config": "How training was spread over devices.",
    "megatron_core": "Which module spread the training over devices.",
    "runtime_config": "How PEFT runs on this machine; PEFT does not save it.",
}
"""Fields that no identity depends on, with the reason. Every other field is bound, also one unknown here."""

INIT_FIELDS: Final = frozenset({"loftq_config", "eva_config", "corda_config", "lora_ga_config"})
"""Parameters of `init_lora_weights`. They matter when it changes the base model, and not otherwise."""

PLAIN_INITS: Final = frozenset({"gaussian", "orthogonal", "eva"})
"""Values of `init_lora_weights`, next to true and false, that set the tensors' first values only.

Trained tensors replaced those. Others, such as `pissa` or `loftq`, also change the base model when PEFT loads the
adapter, so they stay bound, as does any value not known here.
"""

DEFAULTS: Final[dict[str, object]] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 8,
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "use_qalora": False,
    "qalora_group_size": 16,
    "lora_bias": False,
    "ensure_weight_tying": False,
    "rank_pattern": [],
    "alpha_pattern": [],
}
"""What PEFT takes for a field that is absent, in the form below. All others default to null."""

SETS: Final = frozenset({"target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"})
"""Lists that PEFT and the engines only test for membership: order and doubles mean nothing."""

PATTERNS: Final = frozenset({"rank_pattern", "alpha_pattern"})
"""Maps of which the first entry that matches a module wins, so that their order means something."""

RESERVED: Final = "kvprov:"
"""What the names of fields begin with that kvprov adds itself."""


def effective_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a PEFT configuration that its identity depends on.

    A field that is null or has PEFT's default is left out, as if it were absent. Lists of `SETS` are sorted, without
    doubles. Maps of `PATTERNS` become lists of pairs in their order.

    Raises:
        KvprovError: a field's name is reserved, a pattern is no map, or a value has no canonical JSON.
    """
    init = config.get("init_lora_weights", True)
    plain_init = init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in PLAIN_INITS)
    effective: dict[str, object] = {}
    for name, value in config.items():
        if name.startswith(RESERVED):
            raise KvprovError(
                f"The adapter's configuration has the field {name[:80]!r}, but kvprov keeps {RESERVED!r} for itself.",
                "Rename the field.",
            )
        if name in IGNORED_FIELDS or (plain_init and (name in INIT_FIELDS or name == "init_lora_weights")):
            continue
        if name in PATTERNS:
            value = _pairs(name, value)
        elif name in SETS and isinstance(value, list | tuple):
            value = _sorted(value)
        default = DEFAULTS.get(name)
        if canonical_json(value) != canonical_json(default):
            effective[name] = value
    return effective


def _pairs(name: str, value: object) -> list[list[object]]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        # A list of pairs would otherwise pose as the map.
        raise KvprovError(f"The adapter's {name} is no map.", "Correct adapter_config.json.")
    return [[key, item] for key, item in value.items()]


def _sorted(values: list[object] | tuple[object, ...]) -> list[object]:
    by_form = {canonical_json(value): value for value in values}
    return [by_form[form] for form in sorted(by_form)]


def checked_config(config: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return `effective_config(config)`, with errors that name the file it came from.

    Raises:
        UnreadableContentError: the configuration has no effective form.
    """
    try:
        return effective_config(config)
    except KvprovError as error:
        raise UnreadableContentError(path, error.message.rstrip("."), error.advice) from error
