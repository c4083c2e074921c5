from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kvprov.contract import ContractError, Digester, ErrorCode
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.document import evaluate, parse_document
from scripts import make_vectors
from tests.contract import reference

VECTORS = Path(__file__).parents[2] / "spec" / "vectors"
RESULTS = ["enc_hex", "digest_hex", "worker_digest_hex", "text", "text_128"]


def load(file: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((VECTORS / file).read_text(encoding="ascii"))
    return vectors


VALID = load("descriptors.json")
INVALID = load("errors.json")


def by_name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


@pytest.mark.parametrize("vector", VALID, ids=by_name)
def test_kvprov_gives_the_vector(vector: dict[str, Any]) -> None:
    registry, descriptor = parse_document(json.dumps(vector))
    found = evaluate(registry, descriptor)
    assert [found.enc.hex(), found.digest.hex(), found.worker_digest.hex(), found.text, found.text_128] == [
        vector[result] for result in RESULTS
    ]
    assert Digester(registry, descriptor.worker).digest(descriptor.request) == found.digest


@pytest.mark.parametrize("vector", VALID, ids=by_name)
def test_the_reference_gives_the_vector(vector: dict[str, Any]) -> None:
    assert reference.evaluate(vector) == {result: vector[result] for result in RESULTS}


@pytest.mark.parametrize("vector", VALID, ids=by_name)
def test_the_vector_decodes_to_its_descriptor(vector: dict[str, Any]) -> None:
    expected = tuple(
        {name: value.get("identity") for name, value in vector["descriptor"][half].items()} for half in reference.HALVES
    )
    assert reference.decode(bytes.fromhex(vector["enc_hex"])) == expected


@pytest.mark.parametrize("vector", INVALID, ids=by_name)
def test_kvprov_gives_the_error(vector: dict[str, Any]) -> None:
    with pytest.raises(ContractError) as caught:
        evaluate(*parse_document(json.dumps(vector)))
    assert caught.value.code == vector["error"]
    assert caught.value.message
    assert caught.value.advice


@pytest.mark.parametrize("vector", INVALID, ids=by_name)
def test_the_reference_gives_the_error(vector: dict[str, Any]) -> None:
    with pytest.raises(reference.Refused) as caught:
        reference.evaluate(vector)
    assert caught.value.args == (vector["error"],)


def test_vectors_have_the_form_of_the_specification() -> None:
    for vector in VALID:
        assert list(vector) == ["name", "registry", "descriptor", *RESULTS]
    for vector in INVALID:
        assert list(vector) == ["name", "registry", "descriptor", "error"]
    for vector in VALID + INVALID:
        assert list(vector["registry"]) == list(vector["descriptor"]) == ["worker", "request"]


def test_names_are_unique_and_there_are_enough() -> None:
    names = [by_name(vector) for vector in VALID + INVALID]
    assert len(set(names)) == len(names) >= 55


def test_every_error_code_occurs() -> None:
    assert {vector["error"] for vector in INVALID} == set(ErrorCode)


def test_the_built_in_registry_occurs() -> None:
    built_in = [v for v in VALID if parse_document(json.dumps(v))[0].worker == BUILT_IN.worker]
    assert any(parse_document(json.dumps(v))[0].request == BUILT_IN.request for v in built_in)


def test_vectors_of_different_descriptors_differ_in_every_result() -> None:
    compared = 0
    for one, other in itertools.combinations(VALID, 2):
        same = one["descriptor"] == other["descriptor"]
        for result in ("enc_hex", "digest_hex", "text", "text_128"):
            assert (one[result] == other[result]) == same, (one["name"], other["name"])
        same_worker = one["descriptor"]["worker"] == other["descriptor"]["worker"]
        assert (one["worker_digest_hex"] == other["worker_digest_hex"]) == same_worker, (one["name"], other["name"])
        compared += not same
    assert compared > 2000
    assert not {v["digest_hex"] for v in VALID} & {v["worker_digest_hex"] for v in VALID}


@pytest.mark.parametrize("vector", VALID, ids=by_name)
def test_every_single_change_changes_the_digest(vector: dict[str, Any]) -> None:
    registry, descriptor = parse_document(json.dumps(vector))
    halves = {"worker": dict(descriptor.worker), "request": dict(descriptor.request)}
    digests = {evaluate(registry, descriptor).digest}
    changes = 0
    for half, values in halves.items():
        for name in list(values)[:8]:
            before = vector["descriptor"][half][name]
            for after in (make_vectors.ABSENT, make_vectors.known("mutant:1"), make_vectors.known("mutant:2")):
                if after == before:
                    continue
                mutant = json.loads(json.dumps(vector))
                mutant["descriptor"][half][name] = after
                digests.add(evaluate(*parse_document(json.dumps(mutant))).digest)
                changes += 1
    assert len(digests) == 1 + changes


@pytest.mark.parametrize("file", make_vectors.FILES)
def test_the_script_writes_what_is_there(file: str) -> None:
    written = (VECTORS / file).read_text(encoding="ascii")
    assert make_vectors.render(make_vectors.FILES[file]()) == written


def test_the_script_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_vectors, "VECTORS", tmp_path)
    assert make_vectors.main(["--check"]) == 1
    assert list(tmp_path.iterdir()) == [], "a check writes nothing"
    assert make_vectors.main([]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(make_vectors.FILES)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert make_vectors.main([]) == make_vectors.main(["--check"]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
