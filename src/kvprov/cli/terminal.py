"""What is drawn with rich, which only commands that draw import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def page() -> Iterator[Console]:
    """Give a console whose output is written to stdout at the end; colours only on a terminal.

    Nothing printed is taken for markup: what is shown holds paths and messages.
    """
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        yield console
    text = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    # By click rather than rich, which would itself exit with 1 when the reader has gone.
    click.echo(text, nl=False)


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show on stderr that something takes a while, when that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
