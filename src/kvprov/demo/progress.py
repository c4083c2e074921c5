"""Live progress: a line for each engine process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from kvprov.demo import words
from kvprov.demo.plan import Process


class Progress:
    """Shows which process runs, and how long each took. On something that is no terminal, a line when each ends.

    Args:
        console: Where to print.
        total: How many processes there will be.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._started = 0

    @contextmanager
    def step(self, process: Process) -> Iterator[None]:
        """Show `process` as running while the context is entered."""
        self._started += 1
        text = f"[{self._started}/{self._total}] {words.step(process)}"
        began = time.monotonic()
        if not self._console.is_terminal:
            yield
            self._console.print(f"{text}: {time.monotonic() - began:.0f} s", markup=False, highlight=False)
            return
        columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn())
        with RichProgress(*columns, console=self._console) as progress:
            task = progress.add_task(escape(text), total=1)
            yield
            progress.update(task, completed=1)
