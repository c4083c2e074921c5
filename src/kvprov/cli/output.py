"""Reports as JSON, to a file or to standard output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvprov.cli.failure import WANTS_JSON

STDOUT: Final = "-"
_HTML: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
_F = TypeVar("_F", bound=Callable[..., Any])


def dumps(report: Any) -> str:
    """Return `report` as JSON of printable ASCII that holds no markup, wherever it is pasted: names are other people's.

    `<`, `>` and `&` occur in JSON's strings alone, so they are escaped there.
    """
    return json.dumps(report, indent=2, ensure_ascii=True).translate(_HTML)


def _note(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    ctx.meta[WANTS_JSON] = value == STDOUT
    return value


def json_file_option(command: _F) -> _F:
    """Add `--json FILE`, passed as `json_file`; with `-`, JSON takes the place of the report, and of errors."""
    return click.option(
        "--json",
        "json_file",
        metavar="FILE",
        is_eager=True,
        callback=_note,
        help="Write the report to FILE as JSON; - is standard output.",
    )(command)


def write_json(report: Any, json_file: str | None) -> bool:
    """Write `report` where `--json` says, and return whether that was standard output."""
    if json_file is None:
        return False
    if json_file == STDOUT:
        click.echo(dumps(report))
        return True
    Path(json_file).write_text(dumps(report) + "\n", encoding="ascii")
    return False
