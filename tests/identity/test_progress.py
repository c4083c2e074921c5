from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvprov.errors import UnreadableContentError
from kvprov.identity import SilentProgress, identify_checkpoint, rich_progress
from tests.identity.support import write_checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def start(self, total: int) -> None:
        self.calls.append(("start", total))

    def advance(self, count: int) -> None:
        self.calls.append(("advance", count))

    def stop(self) -> None:
        self.calls.append(("stop", 0))


def test_silent_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(rich_progress(), SilentProgress)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stderr, stdout = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "xterm")
    identify_checkpoint(write_checkpoint(tmp_path / "m"), progress=rich_progress("Hashing weights"))
    assert "Hashing weights" in stderr.getvalue()
    assert stdout.getvalue() == ""


def test_advances_to_the_data_and_stops_also_after_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    recorder = Recorder()
    total = identify_checkpoint(folder, progress=recorder).bytes
    assert recorder.calls[0] == ("start", total)
    assert recorder.calls[-1] == ("stop", 0)
    assert sum(count for call, count in recorder.calls if call == "advance") == 64 + 24 + 16 + 2
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"broken")
    recorder = Recorder()
    with pytest.raises(UnreadableContentError):
        identify_checkpoint(folder, progress=recorder)
    assert recorder.calls[-1] == ("stop", 0)
