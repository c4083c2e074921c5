"""What the specification shows and lists is what the code does."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvprov.contract import ErrorCode
from kvprov.contract.descriptor import MAX_IDENTITY_BYTES
from kvprov.contract.dimensions import BUILT_IN, NOT_BOUND
from kvprov.identity import adapter_config, dtypes, model_config, safetensors
from kvprov.identity.kv_representation import KvRepresentation, LayerGroup
from kvprov.identity.precision import Precision
from kvprov.identity.remote_code import remote_code

SPEC_FOLDER = Path(__file__).parents[2] / "spec"
SPEC = (SPEC_FOLDER / "kv-provenance-v1.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}.*?(?=^## |^### |\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[0]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_worked_example_is_its_vector() -> None:
    example = section("3.5")
    vectors = json.loads((SPEC_FOLDER / "vectors" / "descriptors.json").read_text(encoding="ascii"))
    vector = next(vector for vector in vectors if vector["name"] == "worked-example")
    fields = re.findall(r"^    ([0-9a-f]+)  +(.*)$", example, re.MULTILINE)
    assert len(fields) == 21
    assert "".join(octets for octets, _ in fields) == vector["enc_hex"]
    for octets, meaning in fields:
        if length := re.match(r"length (\d+)", meaning):
            assert int(octets, 16) == int(length[1])
        elif text := re.match(r'"(.*)"', meaning):
            assert bytes.fromhex(octets).decode() == text[1]
    prefix = re.search(r"worker digest hashes `([0-9a-f ]+)` followed by the second block", example)
    assert prefix is not None
    second_block = "".join(octets for octets, _ in fields[2:10])
    preimage = bytes.fromhex(prefix[1].replace(" ", "") + second_block)
    assert hashlib.sha256(preimage).hexdigest() == vector["worker_digest_hex"]
    for label, member in {
        "digest": "digest_hex",
        "worker digest": "worker_digest_hex",
        "text, 256 bit": "text",
        "text, 128 bit": "text_128",
    }.items():
        assert re.search(rf"^    {label}  +{re.escape(vector[member])}$", example, re.MULTILINE), label


def test_the_table_of_dimensions_is_the_registry() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (worker|request) \| (\w+) \|", section("2.2"), re.MULTILINE)
    assert sorted(rows) == sorted((d.name, d.half.value, d.kind.value) for d in BUILT_IN)


def test_the_tables_of_checks_have_every_code() -> None:
    rows = re.findall(r"^\| \d \| .* \| `(\w+)` \|$", SPEC, re.MULTILINE)
    assert len(rows) == 8
    assert set(rows) == set(ErrorCode)
    assert f"at most {MAX_IDENTITY_BYTES} oct" in section("2.1")


@pytest.mark.parametrize("name", ["NAME", "IDENTITY"])
def test_the_grammar_is_the_one_in_use(name: str) -> None:
    from kvprov.contract import descriptor, dimension

    pattern = {"NAME": dimension._NAME, "IDENTITY": descriptor._IDENTITY}[name].pattern
    assert re.search(rf"^    {name.lower()} +{re.escape(pattern)}$", section("2.1"), re.MULTILINE)


def test_what_is_not_bound_is_mentioned() -> None:
    for name in NOT_BOUND:
        word = {"engine_version": "engine version"}.get(name, name.replace("_", " "))
        assert word in section("2.2").replace("\n", " "), name


def test_ignored_members_are_listed() -> None:
    listed = section("4.4").partition("Ignored members")[2].partition("\n\n`architectures`")[0]
    assert quoted(listed) - {"model_config", "precision", "kv_representation"} == set(model_config.IGNORED_FIELDS)


IDENTITIES = json.loads((SPEC_FOLDER / "vectors" / "identities.json").read_text(encoding="ascii"))


@pytest.mark.parametrize("name", ["precision", "kv", "model-config"])
def test_the_examples_of_configurations_are_their_vectors(name: str) -> None:
    example = re.search(rf"[Tt]he vector `{name}`[^\n]*\n\n((?:    [^\n]+\n)+)", section("4.4"))
    assert example is not None
    *lines, identity = [line.removeprefix("    ") for line in example[1].splitlines()]
    canonical = "".join(lines)
    assert canonical == json.dumps(json.loads(canonical), separators=(",", ":"), sort_keys=True)
    assert identity == f"config-v1-sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"
    assert identity in [vector["identity"] for vector in IDENTITIES if vector["name"] == name]


def test_the_example_of_remote_code(tmp_path: Path) -> None:
    found = re.search(r"`([a-z_]+\.py)` whose octets are `([0-9a-f]+)` it is\n`([0-9a-f]{64})`", section("4.4"))
    assert found is not None
    (tmp_path / found[1]).write_bytes(bytes.fromhex(found[2]))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "other.py").touch()
    assert remote_code(str(tmp_path), None, {"auto_map": {"AutoModel": "modeling_a.A"}}) == found[3]


def test_the_members_of_configurations_are_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \| ", section("4.4"), re.MULTILINE))
    facts = [fields(facts) for facts in (Precision, KvRepresentation, LayerGroup)]
    resolved = {"architecture", "disable_sliding_window", "max_model_len", "remote_code"}
    resolved |= {"speculative_method", "speculative_tokens", "draft_config", "draft_precision", "draft_weights"}
    assert listed == {field.name for each in facts for field in each} | {"config", "resolved"} | resolved


def test_the_kinds_of_vectors_and_their_members_are_listed() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \| 4\.\d \|$", section("8."), re.MULTILINE))
    assert rows.keys() == {vector["kind"] for vector in IDENTITIES}
    for vector in IDENTITIES:
        members = vector.keys() - {"name", "kind", "identity"}
        assert members <= quoted(rows[vector["kind"]]), vector["name"]


def test_lines_are_short() -> None:
    assert max(map(len, SPEC.splitlines())) <= 150


def test_what_counts_of_an_adapter_is_listed() -> None:
    names = quoted(section("4.2"))
    for listed in (
        adapter_config.IGNORED_FIELDS,
        adapter_config.INIT_FIELDS,
        adapter_config.PLAIN_INITS,
        adapter_config.DEFAULTS,
        adapter_config.SETS,
        adapter_config.PATTERNS,
    ):
        assert set(listed) <= names


def test_element_types_are_listed() -> None:
    assert set(safetensors.DTYPE_BITS) <= quoted(section("4.1"))
    assert {*dtypes._ALIASES, *dtypes._ALIASES.values()} <= quoted(section("4.4"))
