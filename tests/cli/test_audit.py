from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvprov.check.audit import EngineReport, Report, Row
from kvprov.check.audit.run import ENGINES
from kvprov.check.audit.scenario import DIMENSIONS
from kvprov.check.audit.verdict import Cell, Seen, judge
from tests.cli.support import environment, process, run

OMITTED = judge({"fact": Seen(False, samples=3)})
BOUND = judge({"fact": Seen(True, 256, 300)})
NARROW = judge({"fact": Seen(True, 16, 300)})
CARRIED = judge({"fact": Seen(False, samples=3), "path": Seen(True, 64, 3, "path")})


def cells(**others: Cell) -> dict[str, Cell]:
    return {name: others.get(name, BOUND) for name in DIMENSIONS}


def report(*rows: Row, problem: str = "", unknown: tuple[str, ...] = (), missing: tuple[str, ...] = ()) -> Report:
    engine = EngineReport("vllm", {"vllm": "9.9"}, rows, {"Refused": "why"}, unknown, {"Absent": "how"}, problem)
    return Report((engine,), missing)


FINE = Row("One", "One", cells(adapter=OMITTED, weights=CARRIED), cells(), note="a note")
LEAKY = Row("Two", "Two", cells(), cells(sharing_domain=NARROW))
STOCK_ONLY = Row("Three\x1b[2J", "Three", cells(), None, "it cannot")
FAILED = Row("Four", "Four", error="Four cannot be judged: it failed.")


@pytest.mark.parametrize(
    ("found", "exit_code", "said"),
    [
        (report(FINE), 0, "no bound key leaves anything out"),
        (report(FINE, missing=("sglang",)), 0, "sglang is not installed here"),
        (report(FINE, LEAKY), 1, "vllm: Two, bound: sharing_domain is truncated to 16 bits"),
        (report(FINE, unknown=("New",)), 1, "vllm: New is not known to the audit"),
        (report(FINE, FAILED), 3, "Four cannot be judged"),
        (report(problem="it broke"), 3, "vllm: it broke"),
        (Report((), ("vllm", "sglang")), 3, "No engine was audited"),
        # What is unsafe outweighs what is unknown.
        (report(LEAKY, FAILED), 1, "Unsafe."),
    ],
)
def test_exit_codes(found: Report, exit_code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprov.cli.audit.run", lambda _engines: found)
    result = run("audit")
    assert result.exit_code == exit_code
    assert said in result.stdout


def test_an_engine_that_was_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprov.cli.audit.run", lambda _engines: report(FINE, missing=("sglang",)))
    assert run("audit", "--engine", "vllm", "--engine", "sglang").exit_code == 3
    assert run("audit", "--engine", "nothing").exit_code == 2


def test_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprov.cli.audit.run", lambda _engines: report(FINE, STOCK_ONLY))
    lines = run("audit").stdout.splitlines()
    assert lines[0] == "vllm: vllm 9.9"
    assert lines[1].split() == ["connector", "keys", *DIMENSIONS]
    assert (
        lines[2].split()
        == ["One", "stock", "by", "path", "only", "(64", "bits)", *["bound"] * 3, "omitted"] + ["bound"] * 2
    )
    assert lines[3].split() == ["bound", *["bound"] * 7]
    assert "\x1b" not in "".join(lines)
    assert any(line.split() == ["it", "cannot"] for line in lines)
    assert {"  One: a note", "  Refused: why", "  Absent: how"} <= set(lines)


def test_json_to_a_file_and_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprov.cli.audit.run", lambda _engines: report(FINE, LEAKY))
    result = run("audit", "--json", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "Unsafe." in result.stdout
    written = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(run("audit", "--json", "-").stdout) == written
    assert written["engines"][0]["rows"][0]["native"]["weights"]["text"] == "by path only (64 bits)"
    assert written["findings"] == ["vllm: Two, bound: sharing_domain is truncated to 16 bits"]


def test_importing_the_command_imports_no_engine() -> None:
    heavy = "{'torch', 'vllm', 'sglang', 'lmcache', 'numpy', 'rich'}"
    code = f"import sys, kvprov.cli.audit, kvprov.check.audit; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.engine
@pytest.mark.skipif(not ENGINES["vllm"].installed, reason="vLLM is not installed in this environment")
def test_a_withheld_dimension_is_what_bound_keys_leave_out() -> None:
    """By the installed vLLM: bound cells are measured, too."""
    done = process(
        "audit", "--engine", "vllm", "--json", "-", env=environment(KVPROV_UNSAFE_WITHHOLD="adapter,precision")
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    rows = found["engines"][0]["rows"]
    assert len(rows) == 10
    assert found["findings"] == [
        f"vllm: {row['name']}, bound: {name} is omitted" for row in rows for name in ("precision", "adapter")
    ]
