"""How commands fail: one line on stderr, an exit code, and JSON on stdout where it was asked for."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import click

from kvprov.contract.errors import ContractError, KvprovError

UNSAFE: Final = 1
INPUT: Final = 2
ENGINE: Final = 3
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141

WANTS_JSON: Final = "kvprov.json"
"""The member of a context's `meta` that says whether `--json` was given."""

SUBJECT: Final = "kvprov.subject"
"""The member of a context's `meta` that names the file that is being read, for errors that do not name it."""


def one_line(text: str) -> str:
    """Return `text` on one line, without what would move a terminal's cursor: file names can hold anything."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def error_code(error: KvprovError) -> str:
    """Return the name of an error in JSON: the contract's own code, else its class, as in `unreadable_content`."""
    if isinstance(error, ContractError):
        return error.code
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()


def _exit_code(error: KvprovError) -> int:
    from kvprov.errors import BindingError

    return ENGINE if isinstance(error, BindingError) else INPUT


def _sentence(text: str) -> str:
    """Return `text` with a full stop: click ends some of its messages with one."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _fail(
    ctx: click.Context,
    exit_code: int,
    code: str,
    message: str,
    advice: str = "",
    *,
    shown: str = "",
    subject: str = "",
) -> NoReturn:
    """Report an error and exit.

    `subject` stands before the message, and `shown` between them for people, who do not see the error's code otherwise.
    """
    click.echo(f"kvprov: {one_line(f'{subject}{shown}{message} {advice}')}", err=True)
    if ctx.meta.get(WANTS_JSON):
        click.echo(json.dumps({"error": {"code": code, "message": f"{subject}{message}", "advice": advice}}))
    raise click.exceptions.Exit(exit_code)


def _discard_output() -> None:
    """Let what is still buffered go nowhere: Python flushes at exit, and would complain again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        # Standard output is no file, as in tests: then nothing is flushed at exit either.
        return


@contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Turn every expected failure into its report and exit code. Others are bugs, and keep their traceback."""
    try:
        yield
    except click.ClickException as error:
        where = getattr(error, "ctx", None) or ctx
        _fail(ctx, INPUT, "usage", _sentence(error.format_message()), f"See '{where.command_path} --help'.")
    except KvprovError as error:
        subject = f"{ctx.meta[SUBJECT]}: " if SUBJECT in ctx.meta else ""
        shown = f"{error.code}: " if isinstance(error, ContractError) else ""
        _fail(ctx, _exit_code(error), error_code(error), error.message, error.advice, shown=shown, subject=subject)
    except KeyboardInterrupt:
        # The blank line ends the terminal's "^C".
        click.echo("\nkvprov: interrupted.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard_output()
        raise click.exceptions.Exit(OUTPUT_CLOSED) from None
    except OSError as error:
        _fail(ctx, INPUT, "input_output", f"{error}.", "Check the disk and the permissions.")
