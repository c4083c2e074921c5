from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.errors import KvprovError
from kvprov.identity import IGNORED_FIELDS, adapter_identity, canonical_json, effective_config
from kvprov.identity.adapter_config import DEFAULTS, INIT_FIELDS, PATTERNS, PLAIN_INITS
from tests.identity import reference
from tests.identity.support import LORA_CONFIG

DIGEST = bytes(range(32))


def identity(**fields: Any) -> str:
    return adapter_identity(DIGEST, LORA_CONFIG | fields)


def without(*names: str) -> str:
    return adapter_identity(DIGEST, {name: value for name, value in LORA_CONFIG.items() if name not in names})


BASE = identity()


@pytest.mark.parametrize("name", IGNORED_FIELDS)
@pytest.mark.parametrize("value", [None, True, "another", 0.5, {"a": [1]}])
def test_ignores(name: str, value: object) -> None:
    assert identity(**{name: value}) == BASE
    assert len(IGNORED_FIELDS[name]) > 20


SAME: dict[str, dict[str, Any]] = {
    "alpha as a double": {"lora_alpha": 4.0},
    "rank as a double": {"r": 2.0},
    "modules in another order": {"target_modules": ["v_proj", "q_proj"]},
    "modules doubled": {"target_modules": ["q_proj", "v_proj", "q_proj"]},
    "an optional field is null": {"layers_pattern": None},
    "an unknown field is null": {"invented_field": None},
    "init false": {"init_lora_weights": False},
    "init null": {"init_lora_weights": None},
    **{f"init {name}": {"init_lora_weights": name} for name in (*sorted(PLAIN_INITS), "Gaussian")},
    **{f"{name} of a plain init": {name: {"loftq_bits": 4}} for name in sorted(INIT_FIELDS)},
    **{f"default {name}": {name: value} for name, value in DEFAULTS.items() if name not in {*PATTERNS, *LORA_CONFIG}},
    **{f"empty {name}": {name: {}} for name in sorted(PATTERNS)},
    **{f"null {name}": {name: None} for name in sorted(PATTERNS)},
}


@pytest.mark.parametrize("what", SAME)
def test_equal_meanings_have_one_identity(what: str) -> None:
    assert identity(**SAME[what]) == BASE


@pytest.mark.parametrize(("name", "default"), [("r", 8), ("lora_alpha", 8), ("bias", "none"), ("peft_type", "LORA")])
def test_absent_is_the_default_of_peft(name: str, default: object) -> None:
    assert identity(**{name: default}) == without(name)
    assert identity(**{name: default}) == identity(**{name: default, "use_rslora": False})


DIFFERENT: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 8},
    "alpha a little": {"lora_alpha": 4.000001},
    "rank": {"r": 4},
    "rslora": {"use_rslora": True},
    "rslora as a number": {"use_rslora": 1},
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "bias null": {"bias": None},
    "lora bias": {"lora_bias": True},
    "fan in": {"fan_in_fan_out": True},
    "another module": {"target_modules": ["q_proj", "k_proj"]},
    "modules as an expression": {"target_modules": "q_proj|v_proj"},
    "a module and its letters": {"target_modules": "q_proj"},
    "one module": {"target_modules": ["q_proj"]},
    "saved modules": {"modules_to_save": ["score"]},
    "rank pattern": {"rank_pattern": {"q_proj": 4}},
    "alpha pattern": {"alpha_pattern": {"q_proj": 4}},
    "patterns in order": {"alpha_pattern": {"q_proj": 4, "0.q_proj": 8}},
    "patterns in another order": {"alpha_pattern": {"0.q_proj": 8, "q_proj": 4}},
    "layers": {"layers_to_transform": [0, 1]},
    "replication": {"layer_replication": [[0, 2], [1, 3]]},
    "replication in another order": {"layer_replication": [[1, 3], [0, 2]]},
    "alora": {"alora_invocation_tokens": [1, 2]},
    "alora in another order": {"alora_invocation_tokens": [2, 1]},
    "init pissa": {"init_lora_weights": "pissa"},
    "init loftq": {"init_lora_weights": "loftq"},
    "init loftq with a config": {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
    "init unknown": {"init_lora_weights": "invented"},
    "init a number": {"init_lora_weights": 1},
    "a field unknown here": {"invented_field": 1},
    "another value of it": {"invented_field": 2},
    "nothing in it": {"invented_field": {}},
    "another method": {"peft_type": "IA3"},
    "block-diagonal": {"use_bdlora": {"nblocks": 2}},
}


def test_every_difference_in_meaning_has_an_identity() -> None:
    found = {what: identity(**fields) for what, fields in DIFFERENT.items()}
    assert len({BASE, *found.values()}) == len(DIFFERENT) + 1


def test_the_engines_facts_and_further_files_are_bound() -> None:
    values = [
        BASE,
        adapter_identity(DIGEST, LORA_CONFIG, extra={"is_3d_lora_weight": True}),
        adapter_identity(DIGEST, LORA_CONFIG, extra={"is_3d_lora_weight": False}),
        adapter_identity(DIGEST, LORA_CONFIG, files={"new_embeddings.safetensors": "tensors-v1-blake3:00"}),
        adapter_identity(DIGEST, LORA_CONFIG, files={"new_embeddings.safetensors": "tensors-v1-blake3:01"}),
        adapter_identity(DIGEST, LORA_CONFIG, files={"other.safetensors": "tensors-v1-blake3:00"}),
        adapter_identity(DIGEST[::-1], LORA_CONFIG),
    ]
    assert len(set(values)) == len(values)
    assert adapter_identity(DIGEST, LORA_CONFIG, extra={}, files={}) == BASE


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kvprov:engine": {}}, "keeps 'kvprov:' for itself"),
        ({"rank_pattern": [["q_proj", 4]]}, "rank_pattern is no map"),
        ({"alpha_pattern": "q_proj"}, "alpha_pattern is no map"),
        ({"invented": "\ud800"}, "surrogate"),
    ],
)
def test_refuses_what_could_pose_as_something_else(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(KvprovError, match=reason) as caught:
        identity(**fields)
    assert caught.value.advice


def test_refuses_a_short_digest() -> None:
    with pytest.raises(KvprovError, match="16 bytes"):
        adapter_identity(DIGEST[:16], LORA_CONFIG)


FIELDS = [
    *DEFAULTS,
    *sorted(INIT_FIELDS),
    *IGNORED_FIELDS,
    "target_modules",
    "modules_to_save",
    "init_lora_weights",
    "invented",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 16)
    | st.sampled_from([8.0, "none", "LORA", "pissa", "gaussian", "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
CONFIGS = st.dictionaries(
    st.sampled_from([name for name in FIELDS if name not in PATTERNS]), VALUES, max_size=6
) | st.dictionaries(st.sampled_from(sorted(PATTERNS)), st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))


@given(CONFIGS, st.randoms())
def test_agrees_with_the_reference_in_any_order_of_fields(config: dict[str, Any], random: Any) -> None:
    names = list(config)
    random.shuffle(names)
    effective = effective_config({name: config[name] for name in names})
    assert canonical_json(effective).decode() == reference.canonical(reference.effective(config))
    assert not set(effective) & set(IGNORED_FIELDS)
