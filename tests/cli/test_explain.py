"""`kvprov explain`: what is shown, how it ends, and that nothing in a ledger reaches a terminal or a page as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvprov.contract import Known
from kvprov.contract.key import content_identifier, key_text
from kvprov.engines.lmcache.keys import MODEL_NAME, TAG
from tests.cli.support import error_json, error_line, run
from tests.ledger.support import digester, note, request, writer

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e<script>alert('x')</script>\r\n[bold]&amp;"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    records = writer(folder)
    records.note_worker(digester())
    assert records.flush(5)
    return folder


def recorded(
    folder: Path, adapter: str = "a", salt: str | None = None, name: str = "standard", rope: float = 1e4
) -> str:
    records = writer(folder)
    text = note(records, digester(rope_theta=rope), request(adapter, salt), {"adapter": name})
    assert records.flush(5)
    return text


def test_one_digest(ledger: Path) -> None:
    text = recorded(ledger)
    result = run("explain", text, "--ledger", ledger)
    assert result.exit_code == 0
    assert text in result.stdout
    assert "the adapter that its worker calls 'standard'" in result.stdout
    assert "config.rope_parameters.rope_theta = 10000" in result.stdout
    assert "nothing vouches for it" in result.stdout


def test_two_digests_and_the_field_that_separates_them(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = recorded(ledger), recorded(ledger, rope=5e5)
    monkeypatch.setenv("KVPROV_LEDGER", str(ledger))
    result = run("explain", first, second)
    assert result.exit_code == 0
    assert "Neither finds the other's entries: model_config separates them." in result.stdout
    says = "config.rope_parameters.rope_theta is 10000 in the first and 500000 in the second"
    assert f"model_config (computational): {says}." in result.stdout


def test_json_goes_to_a_file_beside_the_report_or_in_its_place(ledger: Path, tmp_path: Path) -> None:
    text = recorded(ledger, salt="x")
    beside = run("explain", text, "--ledger", ledger, "--json", tmp_path / "report.json")
    in_place = run("explain", text, "--ledger", ledger, "--json", "-")
    assert beside.stdout.startswith(text)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(in_place.stdout)
    (key,) = json.loads(in_place.stdout)["keys"]
    assert (key["state"], key["digest"]) == ("known", text)


def test_keys_of_lmcache_and_identifiers_lead_to_their_digest(ledger: Path) -> None:
    text = recorded(ledger)
    for key in (
        content_identifier(text),
        f"/store/{MODEL_NAME}@1@0@{'0' * 64}@bfloat16@{TAG}%{text}.pt",
        f"{MODEL_NAME}-abc@0x01000100@0@{'0' * 64}@{text}.data",
    ):
        result = run("explain", key, "--ledger", ledger)
        assert result.exit_code == 0, result.output
        assert "the adapter that its worker calls 'standard'" in result.stdout
    same = run("explain", f"{MODEL_NAME}-abc@0x01000100@0@{'0' * 64}@{text}.data", text, "--ledger", ledger)
    assert "Both are one digest" in same.stdout
    assert "The keys differ beside the digest" in same.stdout


def test_names_reach_neither_terminal_nor_page_as_they_are(ledger: Path) -> None:
    first, second = recorded(ledger, "a", name=HOSTILE), recorded(ledger, "b", name="other")
    shown = run("explain", first, second, "--ledger", ledger).stdout
    assert "owned" in shown
    assert all(char == "\n" or char.isprintable() for char in shown)
    as_json = run("explain", first, second, "--ledger", ledger, "--json", "-").stdout
    assert "owned" in as_json
    assert not re.search(r"[<>&\x00-\x09\x0b-\x1f\x7f-\U0010ffff]", as_json)
    (name,) = json.loads(as_json)["keys"][0]["said_by_the_writer"]["names"].values()
    assert name == HOSTILE


def test_paths_of_fields_are_escaped_too(tmp_path: Path) -> None:
    from kvprov.identity.canonical import config_identity

    texts = []
    for value in (1, 2):
        records = writer(tmp_path)
        of = digester(model_config=Known(config_identity({"config": {HOSTILE: value}, "resolved": {}})))
        texts.append(note(records, of, request()))
        assert records.flush(5)
    shown = run("explain", *texts, "--ledger", tmp_path).stdout
    assert "owned" in shown
    assert all(char == "\n" or char.isprintable() for char in shown)


def test_a_forged_record_is_reported_and_not_used(ledger: Path) -> None:
    text, other = recorded(ledger), recorded(ledger, "b")
    by_name = {file.stem: file for file in (ledger / "digests").iterdir()}
    ours, theirs = (next(f for stem, f in by_name.items() if stem[:21] == t[:21]) for t in (text, other))
    ours.write_bytes(theirs.read_bytes())
    result = run("explain", text, "--ledger", ledger)
    assert result.exit_code == 1
    assert f"FORGED, not used: digests/{ours.name}: its descriptor encodes to {other}." in result.stdout
    assert "standard" not in result.stdout
    report = json.loads(run("explain", other, text, "--ledger", ledger, "--json", "-").stdout)
    assert [key["state"] for key in report["keys"]] == ["known", "forged"]
    assert report["comparison"] is None


def test_a_forged_configuration_is_reported_and_not_used(ledger: Path) -> None:
    first, second = recorded(ledger), recorded(ledger, rope=5e5)
    for file in (ledger / "configs").iterdir():
        file.write_bytes(file.read_bytes().replace(b"500000", b"10000"))
    result = run("explain", first, second, "--ledger", ledger)
    assert result.exit_code == 1
    assert "FORGED, not used: configs/" in result.stdout
    assert "two different configurations, of which the ledger does not hold both" in result.stdout


@pytest.mark.parametrize("start", ["-", "--", "-h", "--h", "-j", "-V", "--json"])
def test_a_digest_may_begin_like_an_option(ledger: Path, start: str) -> None:
    text = start + "A" * (43 - len(start))
    line = error_line(run("explain", text, "--ledger", ledger))
    assert f"The ledger {ledger} does not know {text}." in line


def test_what_is_not_known_is_an_error(ledger: Path) -> None:
    unknown = key_text(bytes(32))
    result = run("explain", unknown, "--ledger", ledger, "--json", "-")
    assert result.exit_code == 2
    assert error_json(result)["code"] == "ledger"
    assert f"does not know {unknown}" in error_json(result)["message"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["explain", "A" * 43], "No ledger is named"),
        (["explain", "x\x1b[2J", "--ledger", "/nowhere"], "neither a digest nor a key"),
        (["explain", "0" * 64 + "_m_0_1.bin", "--ledger", "/nowhere"], "SGLang's hash chain"),
        (["explain", "A" * 43, "--ledger", "nosuch://x"], "fsspec cannot open"),
        (["explain"], "Missing argument"),
    ],
)
def test_errors_are_one_line(args: list[str], says: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert says in error_line(result)
