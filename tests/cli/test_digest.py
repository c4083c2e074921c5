from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import error_json, error_line, run, vectors

VALID = vectors("descriptors.json")
INVALID = vectors("errors.json")
FORMS = ["text", "text_128", "digest_hex", "worker_digest_hex", "enc_hex"]


def by_name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


@pytest.mark.parametrize("vector", VALID, ids=by_name)
def test_json_gives_the_vector(vector: dict[str, Any]) -> None:
    result = run("digest", "-", "--json", stdin=json.dumps(vector))
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == FORMS
    assert found == {form: vector[form] for form in FORMS}


@pytest.mark.parametrize("vector", INVALID, ids=by_name)
def test_errors_name_the_code(vector: dict[str, Any]) -> None:
    result = run("digest", "-", "--json", stdin=json.dumps(vector))
    assert result.exit_code == 2
    assert error_json(result)["code"] == vector["error"]
    assert error_line(result).startswith(f"kvprov: {vector['error']}: ")


def test_each_form_is_one_line(tmp_path: Path) -> None:
    vector = VALID[0]
    file = tmp_path / "vector.json"
    file.write_text(json.dumps(vector))
    text, digest = vector["text"], vector["digest_hex"]
    assert run("digest", file).stdout == f"{text}\n"
    assert run("digest", file, "--bits", "256").stdout == f"{text}\n"
    assert run("digest", file, "--bits", "128").stdout == f"{vector['text_128']}\n"
    assert run("digest", file, "--hex").stdout == f"{digest}\n"
    assert run("digest", file, "--hex", "--bits", "128").stdout == f"{digest[:32]}\n"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"registry": {}}',
        b"[" * 100_000,
        b'{"registry": NaN}',
        json.dumps(VALID).encode(),
    ],
    ids=["empty", "broken", "list", "no-utf8", "shape", "deep", "nan", "all-vectors"],
)
def test_what_is_no_document(text: bytes) -> None:
    result = run("digest", "-", "--json", stdin=text)
    assert result.exit_code == 2
    assert error_json(result)["code"] == "document"
    error_line(result)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    result = run("digest", tmp_path)
    assert result.exit_code == 2
    assert "Is a directory" in error_line(result)


def test_a_document_cannot_write_to_the_terminal() -> None:
    vector = {
        "registry": {"worker": ["\x1b[2J\nevil"], "request": []},
        "descriptor": {"worker": {}, "request": {}},
    }
    result = run("digest", "-", stdin=json.dumps(vector))
    assert result.exit_code == 2
    assert "\x1b" not in error_line(result)


def test_the_setting_is_the_default_of_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = VALID[0]
    file = tmp_path / "vector.json"
    file.write_text(json.dumps(vector))
    monkeypatch.setenv("KVPROV_DIGEST_BITS", "128")
    # Other settings have no part in it.
    monkeypatch.setenv("KVPROV_MODE", "of")
    assert run("digest", file).stdout == f"{vector['text_128']}\n"
    assert run("digest", file, "--hex").stdout == f"{vector['digest_hex'][:32]}\n"
    assert run("digest", file, "--bits", "256").stdout == f"{vector['text']}\n"
    assert json.loads(run("digest", file, "--json").stdout)["text"] == vector["text"]


@pytest.mark.parametrize("value", ["64", "many", ""])
def test_a_setting_that_cannot_be_used(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "vector.json"
    file.write_text(json.dumps(VALID[0]))
    monkeypatch.setenv("KVPROV_DIGEST_BITS", value)
    result = run("digest", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "neither 256 nor 128" in error_line(result)
    assert str(file) not in error_line(result)
    assert run("digest", file, "--bits", "128").exit_code == 0


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a vector.json"
    file.write_text("[]")
    assert error_line(run("digest", file)).startswith(f"kvprov: {file}: document: an object is expected.")
    file.write_text(json.dumps(INVALID[0]))
    code = INVALID[0]["error"]
    assert error_line(run("digest", file)).startswith(f"kvprov: {file}: {code}: ")
    error = error_json(run("digest", file, "--json"))
    assert error["code"] == code
    assert error["message"].startswith(f"{file}: ")


def test_an_endless_document_is_refused() -> None:
    result = run("digest", "/dev/zero")
    assert result.exit_code == 2
    assert "more than" in error_line(result)
