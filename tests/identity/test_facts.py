"""precision, model_config and kv_representation: resolved, canonical, and each fact in exactly one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvprov.errors import KvprovError
from kvprov.identity.dtypes import canonical_dtype
from kvprov.identity.kv_representation import KvRepresentation, LayerGroup, kv_representation
from kvprov.identity.model_config import IGNORED_FIELDS, model_config
from kvprov.identity.precision import Precision, precision

BF16 = Precision("bfloat16", "bfloat16")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "_name_or_path": "somewhere",
}
GROUP = LayerGroup("attention", 4, "bfloat16", "auto", 2, 64, 64)
KV = KvRepresentation([GROUP], "LBHNC", "Attention:128")


@pytest.mark.parametrize(
    ("names", "canonical"),
    [
        (("half", "float16", "torch.float16", "fp16", "Half"), "float16"),
        (("bfloat16", "torch.bfloat16", "bf16"), "bfloat16"),
        (("float", "float32", "torch.float32", "fp32"), "float32"),
        (("fp8", "fp8_e4m3", "torch.float8_e4m3fn"), "fp8_e4m3"),
        (("fp8_e5m2", "float8_e5m2"), "fp8_e5m2"),
        (("uint8", "torch.uint8"), "uint8"),
    ],
)
def test_aliases_of_one_type_have_one_name(names: tuple[str, ...], canonical: str) -> None:
    assert {canonical_dtype(name) for name in names} == {canonical}


@pytest.mark.parametrize("name", ["auto", "AUTO", "", "None", None])
def test_an_unresolved_type_has_none(name: object) -> None:
    with pytest.raises(KvprovError, match="not resolved"):
        canonical_dtype(name)


def test_precision_names_aliases_alike() -> None:
    assert precision(BF16) == precision(Precision("torch.bfloat16", "bf16"))
    assert precision(Precision("half", "float16")) == precision(Precision("float16", "half"))
    assert precision(BF16) == precision(replace(BF16, adapter_dtype="bfloat16"))


def test_parameters_of_no_quantization_say_nothing() -> None:
    assert precision(BF16) == precision(replace(BF16, parameters={"checkpoint": None}))


@pytest.mark.parametrize(
    "other",
    [
        replace(BF16, weight_dtype="float16"),
        replace(BF16, compute_dtype="float16"),
        replace(BF16, quantization="fp8_per_channel"),
        replace(BF16, quantization="fp8"),
        replace(BF16, quantization="fp8", parameters={"group_size": 64}),
        replace(BF16, quantization="fp8", parameters={"group_size": 128}),
        replace(BF16, adapter_dtype="float32"),
    ],
)
def test_precision_tells_apart(other: Precision) -> None:
    assert precision(other) != precision(BF16)


@pytest.mark.parametrize("field", ["weight_dtype", "compute_dtype", "adapter_dtype"])
def test_precision_is_never_auto(field: str) -> None:
    with pytest.raises(KvprovError, match="not resolved"):
        precision(replace(BF16, **{field: "auto"}))


def test_model_config_ignores_what_is_written_differently_and_means_the_same() -> None:
    same = model_config(LLAMA)
    assert model_config(dict(reversed(LLAMA.items()))) == same
    assert model_config({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}) == same
    assert model_config({k: v for k, v in LLAMA.items() if k != "sliding_window"}) == same


@pytest.mark.parametrize("field", sorted(IGNORED_FIELDS))
def test_model_config_ignores_each_listed_field(field: str) -> None:
    assert model_config({**LLAMA, field: "one"}) == model_config({**LLAMA, field: "two"})
    assert IGNORED_FIELDS[field]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 256},
        {"model_type": "qwen2"},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}},
        {"sliding_window": 128},
        {"text_config": {"rope_theta": 5.0}},
        {"a_field_that_nobody_knows": 1},
    ],
)
def test_model_config_binds_every_other_field(change: dict[str, object]) -> None:
    assert model_config({**LLAMA, **change}) != model_config(LLAMA)


def test_model_config_binds_nested_fields_and_what_the_engine_decided() -> None:
    nested = {"text_config": {"rope_theta": 1.0, "_name_or_path": "a"}}
    assert model_config(nested) == model_config({"text_config": {"rope_theta": 1.0, "_name_or_path": "b"}})
    assert model_config(nested) != model_config({"text_config": {"rope_theta": 2.0, "_name_or_path": "a"}})
    assert model_config(LLAMA, {"architecture": "A"}) != model_config(LLAMA, {"architecture": "B"})
    # What the engine decided cannot be passed off as what the file says.
    assert model_config({"architecture": "A"}, {}) != model_config({}, {"architecture": "A"})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # What the nested language model is, and how it is quantized: nobody else reads it there.
        ({"text_config": {"architectures": ["A"]}}, {"text_config": {"architectures": ["B"]}}),
        ({"text_config": {"quantization_config": {"bits": 4}}}, {"text_config": {"quantization_config": {"bits": 8}}}),
        # Towers beside the language model.
        ({"vision_config": {"num_hidden_layers": 23}}, {"vision_config": {"num_hidden_layers": 24}}),
        ({"vision_config": {"head_dim": 64}}, {"vision_config": {"head_dim": 128}}),
        ({"vision_config": {"torch_dtype": "float32"}}, {"vision_config": {"torch_dtype": "bfloat16"}}),
        ({"layers": [{"num_hidden_layers": 1}]}, {"layers": [{"num_hidden_layers": 2}]}),
        ({"vision_config": {"text_config": {"head_dim": 1}}}, {"vision_config": {"text_config": {"head_dim": 2}}}),
        # Token ids that some models embed, and a range that one of them scales by.
        *[({name: 1}, {name: 2}) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")],
    ],
)
def test_what_nobody_else_owns_is_bound(one: dict[str, object], other: dict[str, object]) -> None:
    assert model_config(one) != model_config(other)


def test_the_nested_language_models_shape_is_kv_representations() -> None:
    for field in ("num_key_value_heads", "num_hidden_layers", "head_dim", "dtype", "torch_dtype"):
        assert model_config({"text_config": {field: 7}}) == model_config({"text_config": {field: 8}})


def test_each_fact_belongs_to_one_dimension() -> None:
    """Heads, layers and head size change kv_representation alone, element types change precision alone."""
    for field in (
        "num_key_value_heads",
        "num_hidden_layers",
        "head_dim",
        "dtype",
        "torch_dtype",
        "quantization_config",
    ):
        assert model_config({**LLAMA, field: 7}) == model_config({**LLAMA, field: 8})


@pytest.mark.parametrize(
    "other",
    [
        replace(KV, layout="LBNHC"),
        replace(KV, packing="Attention:64"),
        replace(KV, groups=[replace(GROUP, kind="latent")]),
        replace(KV, groups=[replace(GROUP, layers=5)]),
        replace(KV, groups=[replace(GROUP, element="float16")]),
        replace(KV, groups=[replace(GROUP, encoding="fp8_e5m2")]),
        replace(KV, groups=[replace(GROUP, kv_heads=4)]),
        replace(KV, groups=[replace(GROUP, head_size=32)]),
        replace(KV, groups=[replace(GROUP, head_size_v=32)]),
        replace(KV, groups=[GROUP, GROUP]),
    ],
)
def test_kv_representation_tells_apart(other: KvRepresentation) -> None:
    assert kv_representation(other) != kv_representation(KV)


def test_kv_representation_resolves_and_does_not_depend_on_order() -> None:
    assert kv_representation(KV) == kv_representation(replace(KV, groups=[replace(GROUP, encoding="bf16")]))
    latent = replace(GROUP, kind="latent")
    assert kv_representation(replace(KV, groups=[GROUP, latent])) == kv_representation(
        replace(KV, groups=[latent, GROUP])
    )
    e4m3, e5m2 = (replace(KV, groups=[replace(GROUP, element="uint8", encoding=e)]) for e in ("fp8", "fp8_e5m2"))
    assert kv_representation(e4m3) != kv_representation(e5m2)
    with pytest.raises(KvprovError, match="not resolved"):
        kv_representation(replace(KV, groups=[replace(GROUP, element="auto")]))
