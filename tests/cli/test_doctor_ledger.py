"""What `kvprov doctor` says of the ledger: never more than a warning, and never a password."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import run


def doctor(monkeypatch: pytest.MonkeyPatch, location: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    monkeypatch.setenv("KVPROV_LEDGER", location)
    result = run("doctor", "--json", "--no-engine")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["settings"]["KVPROV_LEDGER"]["value"] == found["ledger"]["location"]
    return found["ledger"], [f for f in found["findings"] if f["check"] == "KVPROV_LEDGER"]


def test_a_folder_that_workers_can_create(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    location = str(tmp_path / "not" / "there")
    assert doctor(monkeypatch, location) == ({"location": location, "state": "usable"}, [])
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_written_to_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ledger, [finding] = doctor(monkeypatch, str(tmp_path / "file" / "ledger"))
    assert ledger["state"] == "unusable"
    assert finding["level"] == "warning"
    assert "is no folder" in finding["message"]


def test_a_url_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor(monkeypatch, "memory://doctor/ledger") == (
        {"location": "memory://doctor/ledger", "state": "not asked"},
        [],
    )


def test_a_url_that_cannot_be_opened_is_a_warning_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, [finding] = doctor(monkeypatch, "nosuchscheme://user:hush@host/ledger")
    assert ledger == {"location": "nosuchscheme://...@host/ledger", "state": "unusable"}
    assert "hush" not in json.dumps(finding)
    shown = run("doctor", "--no-engine").stdout
    assert "nosuchscheme://...@host/ledger" in shown
    assert "hush" not in shown


def test_a_setting_that_is_refused_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_LEDGER", "s3://user:hush@host/\x1b[2J")
    result = run("doctor", "--json", "--no-engine")
    assert result.exit_code == 1
    assert "control characters" in result.stdout
    assert "hush" not in result.stdout
