"""The processes around the engine, with stand-ins for it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import kvprov.demo
from kvprov.demo import child, runner
from kvprov.demo.errors import DemoError
from tests.demo.made_up import loads, results


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(out: Console) -> str:
    return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_importing_the_demo_imports_nothing_heavy() -> None:
    program = "import sys, kvprov.demo; print([n for n in ('vllm', 'torch', 'rich', 'jinja2') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_environment_is_the_demos_own() -> None:
    caller = {"PATH": "/bin", "KVPROV_UNSAFE_WITHHOLD": "adapter", "KVPROV_MODE": "off", "VLLM_PLUGINS": "other"}
    made = child.environment("enforce", caller)
    assert {name: value for name, value in made.items() if name.startswith("KVPROV_")} == {"KVPROV_MODE": "enforce"}
    assert "VLLM_PLUGINS" not in made
    assert made["PATH"] == "/bin"
    assert made["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", 1, "TMPDIR"),
        ("", -signal.SIGKILL, "memory"),
        ("RuntimeError: out of memory", 1, "memory"),
        ("kvprov.errors.BindingError: vLLM 9 has no x", 1, "kvprov doctor"),
        ("something else", 1, "kvprov doctor"),
        ("", None, "kvprov doctor"),
    ],
)
def test_advice(log: str, code: int | None, expected: str) -> None:
    assert expected in child.advice(log, code)


SLEEPER = """
import os, time
with open({pid!r}, "w") as file:
    file.write(str(os.getpid()))
time.sleep(60)
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Let the engine process be a program of `body`."""
    program = folder / "program.py"
    program.write_text(body)
    launcher = folder / "python"
    # Called as: python -P -m kvprov.demo.phase REQUEST REPLY
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$4" "$5"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))


def test_child_gets_its_request_and_gives_its_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch,
        tmp_path,
        "import json, os, sys\n"
        "request = json.load(open(sys.argv[1]))\n"
        "json.dump({**request, 'mode': os.environ['KVPROV_MODE']}, open(sys.argv[2], 'w'))\n"
        "print('a line')\n",
    )
    log = tmp_path / "x.log"
    assert child.run_child("x", {"prompts": ["é"]}, "off", tmp_path, log) == {"prompts": ["é"], "mode": "off"}
    assert log.read_text() == "a line\n"


def test_child_that_fails_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "for i in range(99): print('line', i)\nraise MemoryError")
    with pytest.raises(DemoError, match="ended with code 1") as caught:
        child.run_child("x", {}, "off", tmp_path, tmp_path / "x.log")
    assert "line 98" in caught.value.message
    assert "line 20\n" not in caught.value.message
    assert "memory" in caught.value.advice


def test_child_without_a_reply_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "")
    with pytest.raises(DemoError, match="ended with code 0"):
        child.run_child("x", {}, "off", tmp_path, tmp_path / "x.log")


def test_child_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LIMIT_SECONDS", 1.5)
    stand_in(monkeypatch, tmp_path, SLEEPER.format(pid=str(tmp_path / "pid")))
    with pytest.raises(DemoError, match=r"did not end within 1\.5 s"):
        child.run_child("x", {}, "off", tmp_path, tmp_path / "x.log")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


INTERRUPTIBLE = """
import sys
from pathlib import Path
from kvprov.demo import child, runner
import kvprov.demo
folder = Path(sys.argv[1])
executable = sys.executable
def measure(output, console):
    sys.executable = str(folder / "python")
    child.run_child("x", {}, "off", folder, folder / "x.log")
runner.measure = measure
sys.exit(kvprov.demo.run(folder / "out"))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 129)]
)
def test_signals_end_the_engine_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    python = sys.executable
    stand_in(monkeypatch, tmp_path, SLEEPER.format(pid=str(tmp_path / "pid")))
    (tmp_path / "main.py").write_text(INTERRUPTIBLE)
    demo = subprocess.Popen([python, str(tmp_path / "main.py"), str(tmp_path)], stdout=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    demo.send_signal(number)
    assert demo.wait(30) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_run_writes_results_and_report_and_returns_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "measure", lambda _output, _console: results())
    out = console()
    assert kvprov.demo.run(tmp_path / "out", out) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["holds"] is True
    assert "</html>" in (tmp_path / "out" / "report.html").read_text()
    assert str(tmp_path / "out" / "report.html") in printed(out)


def test_run_returns_1_when_a_claim_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "measure", lambda _output, _console: results(cross_bound=loads(A=128)))
    out = console()
    assert kvprov.demo.run(tmp_path, out) == 1
    assert "DOES NOT HOLD" in printed(out)
    assert json.loads((tmp_path / "results.json").read_text())["holds"] is False


def test_run_returns_2_when_the_engine_cannot_run_and_leaves_no_old_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_output: Path, _console: Console) -> None:
        raise DemoError("It [broke].", "Mend it.")

    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "report.html").write_text("")
    monkeypatch.setattr(runner, "measure", fail)
    out = console()
    assert kvprov.demo.run(tmp_path, out) == 2
    assert "It [broke].\nMend it." in printed(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["engine", "plugin"])
def test_what_is_not_installed_is_said_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None if missing == "engine" else object())
    monkeypatch.setattr(runner, "entry_points", lambda **_selection: [])
    out = console()
    assert kvprov.demo.run(tmp_path, out) == 2
    assert ("vLLM, which is not installed" if missing == "engine" else "not installed here as a plugin") in printed(out)
    assert "make demo" in printed(out)
