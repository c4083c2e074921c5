"""The offline check on a real model, where it is at hand: `make check-smollm2` fetches it and runs this."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.check.support import COMPUTATIONAL, PERMISSION

FOLDER = Path(os.environ.get("SMOLLM2", ""))
pytestmark = [
    pytest.mark.skipif("SMOLLM2" not in os.environ, reason="opt-in: `make check-smollm2` fetches SmolLM2-135M"),
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason=f"SmolLM2-135M is not in {FOLDER}: not fetched"),
]

ALL = sorted(COMPUTATIONAL | PERMISSION)
ANONYMOUS = re.compile(r"^Anonymous: +(\d+) kB$", re.MULTILINE)


def check(folder: Path, *args: str) -> tuple[dict[str, Any], int, float]:
    """Run the command, and return its report, its largest anonymous memory in bytes, and its seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "kvprov.cli", "check", str(FOLDER), "--json", "report.json", *args]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    largest = 0
    while child.poll() is None:
        try:
            found = ANONYMOUS.search(Path(f"/proc/{child.pid}/smaps_rollup").read_text())
        except OSError:
            continue
        if found is not None:
            largest = max(largest, int(found[1]) * 1024)
        time.sleep(0.02)
    report = json.loads((folder / "report.json").read_text())
    assert child.returncode == report["exit_code"]
    return report, largest, time.monotonic() - began


def float32_bytes() -> int:
    from kvprov.identity.files import open_file
    from kvprov.identity.safetensors import read_header

    with open_file(FOLDER / "model.safetensors") as file:
        elements = 0
        for span in read_header(file):
            count = 1
            for dim in span.shape:
                count *= dim
            elements += count
    return 4 * elements


def omitted(report: dict[str, Any]) -> list[str]:
    return [name for name, verdict in report["verdicts"].items() if verdict == "omission"]


@pytest.mark.timeout(1200)
def test_a_real_model(tmp_path: Path) -> None:
    whole, memory, seconds = check(tmp_path, "--leave-one-out")
    print(f"\ncomplete and leave-one-out: {seconds:.0f} s, {memory / 1e6:.0f} MB of {float32_bytes() / 1e6:.0f} MB")
    for judged in whole["dimensions"]:
        states = [p["state"] for p in judged["pairs"] if p["state"] is not None and p["state"]["readable"]]
        if states:
            print(f"{judged['name']}: up to {max(state['largest'] for state in states):.4g}")
    assert whole["verdicts"] == dict.fromkeys(ALL, "sound")
    assert {
        left: [n for n, v in verdicts.items() if v == "omission"] for left, verdicts in whole["left_out"].items()
    } == {name: [name] for name in ALL}
    assert memory < 2 * float32_bytes()
    assert seconds < 360
    content, memory, seconds = check(tmp_path, "--key", "content-only")
    print(f"content-only: {seconds:.0f} s, {memory / 1e6:.0f} MB")
    assert omitted(content) == ALL
    assert memory < 2 * float32_bytes()
    withheld, _, _ = check(tmp_path, "--withhold", "model_config")
    assert omitted(withheld) == ["model_config"]
