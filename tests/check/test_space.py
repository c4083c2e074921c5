from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvprov.check import Candidate, CheckError, Representation, SpaceFile, load_space
from kvprov.check.space import combine, default_candidates
from kvprov.contract import KvprovError
from kvprov.contract.dimensions import BUILT_IN

TEXT = """
tokens = [5, 6, 7]
defaults = false

[[candidates]]
dimension = "weights"
folder = "../other"

[[candidates]]
dimension = "precision"
quantization = "int8"

[[candidates]]
dimension = "model_config"
name = "far"
config = { rope_parameters = { rope_type = "linear", factor = 4.0 } }

[[candidates]]
dimension = "kv_representation"
element = "fp8_e5m2"
layout = "HND"
serialization = "safetensors"

[[candidates]]
dimension = "sharing_domain"
name = "team a"
salt = "a"

[[candidates]]
dimension = "sharing_domain"
name = "team b"
salt = "b"

[[candidates]]
dimension = "client_namespace"
namespace = "n"

[[candidates]]
dimension = "acme.tier"
identity = "acme.tier:gold"

[[may_share]]
dimension = "sharing_domain"
names = ["team a", "team b"]
"""


def write(folder: Path, text: str, name: str = "space.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_space_in_toml_and_in_json(tmp_path: Path) -> None:
    import tomllib

    found = load_space(write(tmp_path, TEXT))
    assert found.tokens == (5, 6, 7)
    assert not found.defaults
    assert found.candidates == (
        Candidate("weights", "../other", folder=(tmp_path / "../other").resolve()),
        Candidate("precision", "int8", quantization="int8"),
        Candidate("model_config", "far", config={"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
        Candidate(
            "kv_representation",
            "fp8_e5m2, HND, safetensors",
            representation=Representation("fp8_e5m2", "HND", "safetensors"),
        ),
        Candidate("sharing_domain", "team a", text="a"),
        Candidate("sharing_domain", "team b", text="b"),
        Candidate("client_namespace", "n", text="n"),
        Candidate("acme.tier", "acme.tier:gold", identity="acme.tier:gold"),
    )
    assert found.may_share == {("sharing_domain", frozenset({"team a", "team b"}))}
    assert load_space(write(tmp_path, json.dumps(tomllib.loads(TEXT)), "space.json")) == found
    assert load_space(write(tmp_path, "")) == SpaceFile()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens = 1", "tokens: a number above 1"),
        ("tokens = [true, 2]", "tokens: a number above 1"),
        ("defaults = 1", "defaults: true or false"),
        ("candidate = []", "'candidate' does not belong here"),
        ("candidates = 3", "candidates: a list is expected"),
        ("candidates = [3]", "dimension: a text is expected"),
        ("candidates = [{dimension = 'weights'}]", "a candidate of weights needs 'folder'"),
        ("candidates = [{dimension = 'weights', salt = 'x'}]", "'salt' does not belong here"),
        ("candidates = [{dimension = 'precision', quantization = 'int3'}]", "known are fp8, int8"),
        ("candidates = [{dimension = 'kv_representation', layout = 'XYZ'}]", "'XYZ' is no layout"),
        ("candidates = [{dimension = 'Not A Name'}]", "not a dimension name"),
        ("candidates = [{dimension = 'acme.x', identity = 'none'}]", "is not an identity"),
        ("may_share = [{dimension = 'sharing_domain', names = ['X']}]", "two names"),
        ("tokens = ", "is no TOML"),
    ],
)
def test_a_space_that_cannot_be_used(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(KvprovError, match=says) as caught:
        load_space(write(tmp_path, text))
    assert caught.value.advice


def test_a_space_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="cannot be read"):
        load_space(tmp_path / "none.toml")


def defaults() -> dict[str, tuple[Candidate, ...]]:
    config = {"rotary base doubled": {"rope_theta": 2.0}}
    return default_candidates(Path("/m"), weights=[], adapters=[], element="bfloat16", config=config)


def test_what_is_added_comes_after_the_base() -> None:
    added = SpaceFile((Candidate("model_config", "mine", config={"a": 1}),))
    space = combine((1, 2), BUILT_IN, defaults(), added, {})
    assert [c.name for c in space.candidates["model_config"]] == ["as supplied", "rotary base doubled", "mine"]
    assert space.base["model_config"].config == {}
    assert len(list(space.pairs("model_config"))) == 3
    alone = combine((1, 2), BUILT_IN, defaults(), SpaceFile(added.candidates, defaults=False), {})
    assert [c.name for c in alone.candidates["model_config"]] == ["as supplied", "mine"]
    assert [name for name in alone.candidates if alone.is_tested(name)] == ["model_config"]


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (SpaceFile((Candidate("acme.x", "a"),)), "not registered"),
        (SpaceFile((Candidate("sharing_domain", "X", text="x"),)), "Two candidates of sharing_domain"),
        (SpaceFile(may_share=frozenset({("sharing_domain", frozenset({"X", "Z"}))})), "no two candidates"),
        (SpaceFile(may_share=frozenset({("precision", frozenset({"X", "Y"}))})), "permission"),
    ],
)
def test_what_cannot_be_added(added: SpaceFile, says: str) -> None:
    with pytest.raises(CheckError, match=says):
        combine((1, 2), BUILT_IN, defaults(), added, {})
