"""What is being compared, for whoever waits: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Steps(Protocol):
    """What is told how far a check has come."""

    def start(self, total: int) -> None:
        """Begin, with `total` steps to do."""

    def step(self, what: str) -> None:
        """Begin the next step."""

    def stop(self) -> None:
        """End, whether all steps were done or an error came first."""


class SilentSteps:
    """Shows nothing."""

    def start(self, total: int) -> None:
        """Ignore the start."""

    def step(self, what: str) -> None:
        """Ignore the step."""

    def stop(self) -> None:
        """Ignore the end."""


class _RichSteps:
    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # Text of candidates' names must not be taken for markup.
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=total)

    def step(self, what: str) -> None:
        if self._bar is not None and self._task is not None:
            # Drawn at once: a short step would come and go between two of the bar's own moments.
            self._bar.update(self._task, advance=1, description=what, refresh=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def rich_steps() -> Steps:
    """Return steps that draw a bar on stderr when that is a terminal, and show nothing otherwise."""
    return _RichSteps() if sys.stderr.isatty() else SilentSteps()
