"""Progress of a long hash: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Progress(Protocol):
    """What is told how far a hash has come."""

    def start(self, total: int) -> None:
        """Begin, with `total` bytes to hash."""

    def advance(self, count: int) -> None:
        """Note that another `count` bytes are hashed."""

    def stop(self) -> None:
        """End, whether all bytes were hashed or an error came first."""


class SilentProgress:
    """Shows nothing."""

    def start(self, total: int) -> None:
        """Ignore the start."""

    def advance(self, count: int) -> None:
        """Ignore the bytes."""

    def stop(self) -> None:
        """Ignore the end."""


class _RichProgress:
    def __init__(self, description: str) -> None:
        self._description = description
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._description, total=total)

    def advance(self, count: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def rich_progress(description: str = "Hashing") -> Progress:
    """Return a progress that draws a bar on stderr when that is a terminal, and shows nothing otherwise."""
    return _RichProgress(description) if sys.stderr.isatty() else SilentProgress()
