"""`kvprov demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from kvprov.cli.failure import ENGINE
from kvprov.errors import BindingError

_DEMO_COULD_NOT_RUN: Final = 2


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, writable=True, path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    metavar="DIR",
    help="Where results, report and logs go.",
)
@click.pass_context
def demo(ctx: click.Context, output: Path) -> None:
    """Show foreign state being served by a real engine, and kvprov preventing it.

    Runs vLLM on this machine with a small bundled model, without kvprov and with it. Takes some minutes. Exits with 1
    when a claim does not hold.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(
            f"the folder {str(output)!r} cannot be created: {error.strerror or error}.", ctx, param_hint="'--output'"
        ) from error
    try:
        from kvprov.demo import run

        code = run(output)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"vllm", "torch"}:
            raise
        raise BindingError(
            f"The demo needs vLLM: there is no module {error.name}.", "Install it: pip install 'kvprov[vllm]'."
        ) from error
    # The demo counts an engine that could not run as 2, which is an input error to this command.
    ctx.exit(ENGINE if code == _DEMO_COULD_NOT_RUN else code)
