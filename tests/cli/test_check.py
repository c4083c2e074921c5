from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprov.cli.failure import ENGINE
from tests.cli.support import MODEL, environment, error_json, error_line, process, run

BASE = MODEL / "base"
ADAPTERS = [arg for name in ("standard", "inverted") for arg in ("--adapter", str(MODEL / "adapters" / name))]
SMALL = "tokens = 8\ndefaults = false\n"
DIMENSIONS = [
    "adapter",
    "client_namespace",
    "kv_representation",
    "model_config",
    "precision",
    "sharing_domain",
    "weights",
]


@pytest.fixture
def space(tmp_path: Path) -> Path:
    """A space of two salts, which is quick."""
    file = tmp_path / "space.toml"
    salts = "".join(f"[[candidates]]\ndimension = 'sharing_domain'\nsalt = '{salt}'\n" for salt in "ab")
    file.write_text(SMALL + salts)
    return file


def test_two_processes_and_two_folders_agree(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "copy"
    shutil.copytree(MODEL, elsewhere)
    other = [arg for name in ("standard", "inverted") for arg in ("--adapter", str(elsewhere / "adapters" / name))]
    runs = {"here": (BASE, ADAPTERS), "there": (elsewhere / "base", other)}
    reports: dict[str, Any] = {}
    for name, (model, adapters) in runs.items():
        file = tmp_path / f"{name}.json"
        done = process("check", model, *adapters, "--leave-one-out", "--json", file)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        assert "The key omits no dimension that was tested." in done.stdout
        reports[name] = json.loads(file.read_text())
    here, there = reports["here"], reports["there"]
    assert here["verdicts"] == there["verdicts"] == dict.fromkeys(DIMENSIONS, "sound")
    assert here["left_out"] == there["left_out"]
    assert here["left_out"] == {
        name: {other: "omission" if other == name else "sound" for other in DIMENSIONS} for name in DIMENSIONS
    }
    # Not only the verdicts: every number that they rest on, since what is generated and perturbed is the same.
    assert here["dimensions"] == there["dimensions"]
    assert here["seconds"] < 120


def test_content_only_and_one_dimension_withheld(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = process("check", BASE, *ADAPTERS, "--key", "content-only", "--html", html, env=environment(COLUMNS="80"))
    assert (done.returncode, done.stderr) == (1, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = dict(re.findall(r"^(\w+) +(omission|sound)", done.stdout, re.MULTILINE))
    assert rows == dict.fromkeys(DIMENSIONS, "omission")
    assert "The key omits adapter, client_namespace" in html.read_text()
    done = process("check", BASE, *ADAPTERS, "--withhold", "model_config", "--json", "-")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["withheld"] == ["model_config"]
    assert [name for name, verdict in found["verdicts"].items() if verdict == "omission"] == ["model_config"]


def test_a_key_of_somebodys_own(tmp_path: Path, space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It prints, and is found in the current folder.
    (tmp_path / "acme_keys.py").write_text(
        "import uuid\n"
        "def good(case):\n    print('noise')\n    return repr((case.tokens, case.salt))\n"
        "def bad(case):\n    return repr(case.tokens)\n"
        "def never(case):\n    return uuid.uuid4().hex\n"
    )
    monkeypatch.chdir(tmp_path)
    good = run("check", BASE, "--space", space, "--key", "acme_keys:good")
    assert good.exit_code == 0, good.stdout
    assert "adapter is not tested." in good.stdout
    assert "Not tested: adapter, client_namespace" in " ".join(good.stdout.split())
    bad = run("check", BASE, "--space", space, "--key", "acme_keys.bad")
    assert bad.exit_code == 1
    assert "sharing_domain: not bound" in bad.stdout
    never = run("check", BASE, "--space", space, "--key", "acme_keys:never")
    assert never.exit_code == 4
    assert "Cannot judge" in never.stdout
    assert "over-separated" in never.stdout


def test_settings_are_those_of_an_engine(space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_UNSAFE_WITHHOLD", "sharing_domain")
    result = run("check", BASE, "--space", space, "--json", "-")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["withheld"] == ["sharing_domain"]
    assert found["verdicts"]["sharing_domain"] == "omission"
    monkeypatch.setenv("KVPROV_REQUIRE_SECRET", "1")
    assert run("check", BASE, "--space", space).exit_code == 2


def in_json(*args: str | Path) -> dict[str, str]:
    result = run("check", *args, "--json", "-")
    assert result.exit_code == 2
    return error_json(result)


def test_what_cannot_be_used(tmp_path: Path, space: Path) -> None:
    assert error_line(run("check", tmp_path / "none")).startswith("kvprov: ")
    assert in_json(tmp_path / "none")["code"] == "unreadable_content"
    assert in_json(BASE, "--space", tmp_path / "none")["code"] == "check"
    assert in_json(BASE, "--space", space, "--key", "nothing.here:key")["code"] == "check"
    assert in_json(BASE, "--space", space, "--withhold", "wieghts")["code"] == "unregistered_dimension"
    result = run("check", BASE, "--leave-one-out", "--key", "content-only")
    assert result.exit_code == 2
    assert "kvprov's own key" in error_line(result)
    assert in_json(tmp_path)["code"] == "unidentifiable"
    shutil.copy(BASE / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert in_json(tmp_path)["code"] == "check"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_package_that_is_missing(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kvprov.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "check", str(BASE)], text=True, capture_output=True)
    assert done.returncode == ENGINE
    assert "pip install 'kvprov[check]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bar_shows_what_is_compared(space: Path, tmp_path: Path) -> None:
    read, write = pty.openpty()
    shown: list[bytes] = []
    thread = threading.Thread(target=drain, args=(read, shown.append))
    thread.start()
    with os.fdopen(write, "wb") as terminal:
        command = [sys.executable, "-m", "kvprov.cli", "check", str(BASE), "--space", str(space)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment(TERM="xterm"))
    thread.join()
    assert done.returncode == 0
    assert b"sharing_domain:" in b"".join(shown)
    assert b"\x1b[" not in done.stdout


def drain(fd: int, add: Callable[[bytes], None]) -> None:
    with os.fdopen(fd, "rb", buffering=0) as terminal:
        while True:
            try:
                data = terminal.read(4096)
            except OSError:
                return
            if not data:
                return
            add(data)
