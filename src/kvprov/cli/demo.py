"""`kvprov demo`."""

from __future__ import annotations

from pathlib import Path

import click

from kvprov.errors import BindingError


@click.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the report goes.",
)
@click.pass_context
def demo(ctx: click.Context, output: Path | None) -> None:
    """Show foreign state being served by a real engine, and kvprov preventing it.

    Runs vLLM on this machine's CPU with a small bundled model, without and with kvprov. Takes some minutes.
    """
    try:
        from kvprov.demo import run

        held = run(output)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"vllm", "torch"}:
            raise
        raise BindingError(
            f"The demo needs vLLM: there is no module {error.name}.", "Install it: pip install 'kvprov[vllm]'."
        ) from error
    if held is False:
        ctx.exit(1)
