"""State as it is stored and read, and what changes it: on small tensors, and on the bundled model."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprov.check import CheckError, Representation, lora
from kvprov.check.changes import quantize, window_mask
from kvprov.check.compare import Place, difference
from kvprov.check.prefill import Model, Run, State
from kvprov.check.space import ELEMENTS, LAYOUTS, SERIALIZATIONS
from kvprov.check.stored import read, store
from kvprov.check.verdicts import Fault
from kvprov.check.weights import perturb
from kvprov.errors import UnidentifiableError
from kvprov.identity import identify_adapter, identify_checkpoint
from tests.check.support import ADAPTERS, BASE

LAYERS, HEADS, TOKENS, SIZE = 3, 2, 5, 4
TOKEN_IDS = tuple(range(10, 42))


def made(seed: int = 0) -> State:
    """Return random state of halves up to 3, which every element type holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, TOKENS, SIZE)

    def numbers() -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 2).round().clamp(-6, 6) / 2

    return State(tuple((numbers(), numbers()) for _ in range(LAYERS)))


EVERY = [Representation(*form) for form in itertools.product(ELEMENTS, LAYOUTS, SERIALIZATIONS)]


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_what_is_stored_is_read_again(form: Representation) -> None:
    state = made()
    entry = store(state, form)
    again = read(entry, state, form)
    assert again is not None
    for ours, theirs in zip(state.layers, again.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    found = difference((state, form), (state, form))
    assert (found.equal, found.largest, found.place, found.tokens) == (True, 0.0, None, 0)
    # Every other form has other bytes.
    assert [other for other in EVERY if store(state, other).layers == entry.layers] == [form]


def test_beyond_the_range_is_the_largest_number() -> None:
    state = State(((torch.full((1, 2, 2), 1e6), torch.full((1, 2, 2), -1e6)),))
    for element, largest in (("float16", 65504.0), ("fp8_e4m3", 448.0)):
        again = read(store(state, Representation(element)), state, Representation(element))
        assert again is not None
        assert (again.layers[0][0].max(), again.layers[0][1].min()) == (largest, -largest)


def test_another_size_is_unreadable() -> None:
    state = made()
    found = difference((state, Representation("fp8_e4m3")), (state, Representation("bfloat16")))
    assert (found.equal, found.readable, found.largest, found.tokens) == (False, False, None, TOKENS)
    packed = Representation("bfloat16", serialization="safetensors")
    assert not difference((state, Representation("bfloat16")), (state, packed)).readable
    assert not difference((state, Representation("bfloat16", "HND", "safetensors")), (state, packed)).readable


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("form", ["NHD", "HND"])
def test_where_it_differs_is_found(part: str, form: str) -> None:
    state, other = made(), made()
    which = 0 if part == "keys" else 1
    other.layers[1][which][1, 3, 2] += 0.5
    other.layers[2][which][0, 1, 0] -= 2.0
    representation = Representation("float32", form)
    found = difference((other, representation), (state, representation))
    assert found.place == Place(layer=2, head=0, token=1, part=part)
    assert found.largest == pytest.approx(2.0)
    assert found.tokens == 2
    assert found.layers == (0.0, pytest.approx(0.5), pytest.approx(2.0))


def test_no_number_is_an_infinite_difference() -> None:
    state, other = made(), made()
    other.layers[0][0][0, 0, 0] = math.nan
    found = difference((other, Representation("float32")), (state, Representation("float32")))
    assert found.largest == math.inf
    assert found.place == Place(0, 0, 0, "keys")


# What changes state, on the bundled model.


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(BASE)


def run(model: Model, **changes: Any) -> State:
    plain = {"weights": BASE, "config": {}, "quantization": None, "adapter": None}
    return model.run(Run(**{**plain, **changes}), TOKEN_IDS)


def test_a_rotary_base_turns_keys_alone(model: Model) -> None:
    base, turned = run(model), run(model, config={"rope_theta": 20000.0})
    assert torch.equal(base.layers[0][1], turned.layers[0][1])
    assert not torch.equal(base.layers[0][0], turned.layers[0][0])
    # The first token is at angle 0, whatever the base.
    assert torch.equal(base.layers[0][0][:, 0], turned.layers[0][0][:, 0])


def test_a_window_changes_tokens_beyond_it(model: Model) -> None:
    base, window = run(model), run(model, config={"sliding_window": 8})
    wide = run(model, config={"sliding_window": len(TOKEN_IDS)})
    for (k, v), (k2, v2), (k3, v3) in zip(base.layers, window.layers, wide.layers, strict=True):
        assert torch.allclose(k[:, :8], k2[:, :8], atol=1e-5)
        assert torch.allclose(v[:, :8], v2[:, :8], atol=1e-5)
        assert torch.allclose(k, k3, atol=1e-5)
        assert torch.allclose(v, v3, atol=1e-5)
    assert not torch.allclose(base.layers[-1][1][:, 8], window.layers[-1][1][:, 8], atol=1e-3)


def test_a_window_is_the_tokens_before() -> None:
    seen = window_mask(6, 3)[0, 0] == 0
    assert [[j for j in range(6) if seen[i, j]] for i in range(6)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
    ]


def test_a_window_agrees_with_a_model_that_has_one() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from kvprov.check.prefill import _prefill

    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    own = MistralForCausalLM(config).eval()
    with torch.inference_mode():
        theirs, ours = _prefill(own, tuple(range(12)), None), _prefill(own, tuple(range(12)), 4)
        without = _prefill(own, tuple(range(12)), 12)
    assert all(torch.allclose(a[1], b[1], atol=1e-6) for a, b in zip(theirs.layers, ours.layers, strict=True))
    assert not torch.allclose(theirs.layers[1][1], without.layers[1][1], atol=1e-4)


@pytest.mark.parametrize(("quantization", "step"), [("int8", 1 / 127 / 2), ("fp8", 2**-4)])
def test_quantization_rounds_each_channel_for_itself(quantization: str, step: float) -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(16, 8, bias=False)
            self.head = torch.nn.Linear(8, 4, bias=False)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    small = Small()
    with torch.inference_mode():
        small.one.weight.data[3] *= 1e-3
        before, head = small.one.weight.data.clone(), small.head.weight.data.clone()
        quantize(small, quantization)
        after = small.one.weight.data
    assert torch.equal(small.head.weight.data, head), "engines leave the output layer as it is"
    largest = before.abs().amax(dim=1, keepdim=True)
    error = ((after - before).abs() / largest).amax(dim=1)
    assert (error <= step * 1.001).all()
    assert (error > 0).all()
    for row in after:
        assert len(row.unique()) <= (255 if quantization == "int8" else 16)


def test_an_adapter_of_values_changes_values_alone(model: Model) -> None:
    base, with_adapter = run(model), run(model, adapter=ADAPTERS[0])
    assert torch.equal(base.layers[0][0], with_adapter.layers[0][0])
    assert not torch.equal(base.layers[0][1], with_adapter.layers[0][1])


def test_an_update_is_what_lora_adds(tmp_path: Path) -> None:
    modules = {"model.layers.0.self_attn.k_proj": (6, 4), "model.layers.1.self_attn.v_proj": (3, 4)}
    adapter = lora.generate(modules, seed=7, rank=2)
    first, second = dict(lora.updates(adapter, tmp_path)).values()
    a = adapter.tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"]
    b = adapter.tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"]
    assert torch.allclose(first, 2.0 * b @ a)
    assert (first.shape, second.shape) == ((6, 4), (3, 4))
    rs = lora.Adapter({**adapter.config, "use_rslora": True}, adapter.tensors)
    assert torch.allclose(dict(lora.updates(rs, tmp_path))["model.layers.0.self_attn.k_proj"], 4 / math.sqrt(2) * b @ a)
    pattern = lora.Adapter({**adapter.config, "alpha_pattern": {"k_proj": 1}}, adapter.tensors)
    one, two = dict(lora.updates(pattern, tmp_path)).values()
    assert torch.allclose(one, 0.5 * b @ a)
    assert torch.equal(two, second)
    for changed in ({"use_dora": True}, {"peft_type": "IA3"}, {"r": 3}):
        with pytest.raises(CheckError):
            list(lora.updates(lora.Adapter({**adapter.config, **changed}, adapter.tensors), tmp_path))
    more = {**adapter.tensors, "base_model.model.lm_head.weight": a}
    with pytest.raises(CheckError, match="no LoRA matrices"):
        list(lora.updates(lora.Adapter(adapter.config, more), tmp_path))


def test_variants_differ_in_one_place_and_in_identity(tmp_path: Path) -> None:
    original = lora.read_adapter(ADAPTERS[0])
    found = list(lora.variants(original))
    names = sorted(original.tensors)
    assert [v.what for v in found if v.fault is Fault.TENSOR] == [f"the tensor {name}" for name in names]
    identities = {identify_adapter(ADAPTERS[0]).identity}
    for i, variant in enumerate(found):
        lora.write_adapter(variant.adapter, tmp_path / str(i))
        identities.add(identify_adapter(tmp_path / str(i)).identity)
        changed = [n for n in names if not torch.equal(original.tensors[n], variant.adapter.tensors[n])]
        assert len(changed) == {Fault.TENSOR: 1, Fault.TENSOR_NAMES: 2, Fault.ADAPTER_CONFIG: 0}[variant.fault]
    assert len(identities) == len(found) + 1 == len(names) + 3


def test_an_adapter_of_another_model(model: Model, adapter: Path) -> None:
    lora.write_adapter(lora.generate({"model.layers.9.self_attn.k_proj": (128, 128)}, 1), adapter)
    with pytest.raises(CheckError, match="the model has not"):
        run(model, adapter=adapter)
    lora.write_adapter(lora.generate({"model.layers.0.self_attn.k_proj": (64, 128)}, 1), adapter)
    with pytest.raises(CheckError, match=r"by \(64, 128\), but it has \(128, 128\)"):
        run(model, adapter=adapter)


def test_perturbed_weights_are_the_same_each_time(model: Model, tmp_path: Path) -> None:
    a, b = perturb(BASE, tmp_path / "a", 1), perturb(BASE, tmp_path / "b", 1)
    identity = identify_checkpoint(a).identity
    assert identity == identify_checkpoint(b).identity
    assert identity != identify_checkpoint(BASE).identity
    assert identity != identify_checkpoint(perturb(BASE, tmp_path / "c", 2)).identity
    base, other = run(model), run(model, weights=a)
    assert all(not torch.equal(k, k2) for (k, _), (k2, _) in zip(base.layers, other.layers, strict=True))


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnidentifiableError):
        Model(tmp_path)
    shutil.copy(BASE / "model.safetensors", tmp_path)
    with pytest.raises(CheckError, match="cannot read the configuration"):
        Model(tmp_path)
    (tmp_path / "config.json").write_text(
        (BASE / "config.json").read_text().replace('"hidden_size": 128', '"hidden_size": 64')
    )
    with pytest.raises(CheckError, match="cannot load"):
        Model(tmp_path).run(Run(tmp_path, {}, None, None), TOKEN_IDS)


def test_a_checkpoint_that_is_not_whole(model: Model, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(BASE / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckError, match=r"lacks the tensor 'model.layers.2.self_attn.k_proj.weight'"):
        run(model, weights=tmp_path)
