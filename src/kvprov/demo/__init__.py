"""The demo: what an adapter's worker is served out of a shared store, without kvprov and with it, on a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]


def run(output: Path = Path("build/demo"), console: Console | None = None) -> int:
    """Run the demo, print its table, and write `results.json`, `report.html` and `logs/` to `output`.

    Args:
        output: The folder to write to; created when it is missing.
        console: Where to print; standard output by default.

    Returns:
        0 when every claim holds, 1 when one does not, 2 when the engine could not run, 130 after Ctrl-C.
    """
    from kvprov.demo.runner import run_demo

    return run_demo(output, console)
