"""Engines that answer with something else than a report, and drivers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprov.check.audit.run import ENGINES, _Engine, run
from kvprov.check.audit.subject import GROUP, declared_subjects
from kvprov.errors import SettingsError
from tests.cli.support import install

INSTALLED = ("pytest",)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(1)", "its audit failed: without a word"),
        ("import nothing_of_this_name", "its audit failed: ModuleNotFoundError: No module named"),
        ("import os; os.kill(os.getpid(), 9)", "its audit failed: without a word"),
        ("print('no report')", "its audit answered with what is no report"),
        ("print('{}')", "its audit answered with what is no report"),
        ("print('[]')", "its audit answered with what is no report"),
        ("import time; time.sleep(60)", "its audit took longer than"),
    ],
)
def test_a_child_that_gives_no_report(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_child.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("kvprov.check.audit.run.SECONDS", 3)
    monkeypatch.setitem(ENGINES, "acme", _Engine(INSTALLED, "acme_child"))
    report = run(["acme"])
    assert report.engines[0].problem.startswith(said)
    assert len(report.failures) == 1


def test_a_child_sees_no_ledger_and_equal_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_child.py").write_text(
        "import json, os, sys\n"
        "from kvprov.check.audit import EngineReport\n"
        "seen = {name: os.environ.get(name, 'unset') for name in ('KVPROV_LEDGER', 'PYTHONHASHSEED')}\n"
        "print(json.dumps(EngineReport('acme', seen).to_json()))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KVPROV_LEDGER", str(tmp_path))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setitem(ENGINES, "acme", _Engine(INSTALLED, "acme_child"))
    monkeypatch.setitem(ENGINES, "none", _Engine(("no-package-of-this-name",), "acme_child"))
    report = run(["acme", "none"])
    assert report.failures == []
    assert report.engines[0].versions == {"KVPROV_LEDGER": "unset", "PYTHONHASHSEED": "0"}
    assert report.missing == ("none",)


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("acme:missing", "cannot be loaded"),
        ("nowhere:subject", "cannot be loaded"),
        ("acme:number", "gives no subjects"),
        ("acme:numbers", "gives no subjects"),
    ],
)
def test_drivers_that_are_none(point: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install(tmp_path, "acme", {GROUP: [f"acme = {point}"]}, acme="number = 5\ndef numbers(): return [5]\n")
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(SettingsError, match=said):
        declared_subjects()


def test_a_function_may_give_several_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from kvprov.check.audit import Subject\n"
        "def both():\n    return [Subject(name, name, lambda s: [b'']) for name in ('A', 'B')]\n"
    )
    site = install(tmp_path, "acme", {GROUP: ["acme = acme_two:both"]}, acme_two=source)
    monkeypatch.syspath_prepend(str(site))
    assert [subject.name for subject in declared_subjects()] == ["A", "B"]
