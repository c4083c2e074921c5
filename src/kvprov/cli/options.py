"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvprov.cli.failure import WANTS_JSON

_F = TypeVar("_F", bound=Callable[..., Any])


def _note(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    ctx.meta[WANTS_JSON] = value
    return value


def json_option(command: _F) -> _F:
    """Add `--json`, passed as `as_json`. It is read first, so that errors in other arguments are JSON, too."""
    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=_note, help="Write JSON.")(command)
