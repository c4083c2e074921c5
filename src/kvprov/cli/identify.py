"""`kvprov identify`."""

from __future__ import annotations

import json

import click

from kvprov.cli.failure import one_line
from kvprov.cli.options import json_option
from kvprov.cli.terminal import page
from kvprov.identity.adapter import CONFIG_FILE, identify_adapter
from kvprov.identity.checkpoint import Identified, identify_checkpoint, resolve_folder
from kvprov.identity.digest_cache import default_cache
from kvprov.identity.progress import rich_progress


@click.command()
@click.argument("path")
@json_option
def identify(path: str, as_json: bool) -> None:
    """Print the identity of a checkpoint or an adapter, as an engine would bind it.

    PATH is a folder, or a Hugging Face hub id whose main revision is in the local cache. A folder with an
    adapter_config.json is an adapter. Digests of unchanged checkpoint files are remembered, those of adapters never.
    """
    folder = resolve_folder(path)
    if (folder / CONFIG_FILE).exists():
        kind, found = "adapter", identify_adapter(folder, progress=rich_progress())
    else:
        kind, found = "checkpoint", identify_checkpoint(folder, cache=default_cache(), progress=rich_progress())
    if as_json:
        click.echo(
            json.dumps(
                {
                    "kind": kind,
                    "identity": found.identity,
                    "bytes": found.bytes,
                    "tensors": found.tensors,
                    "seconds": found.seconds,
                    "files": found.files,
                    "cached": found.cached,
                },
                indent=2,
            )
        )
    else:
        _show(kind, found)


def _show(kind: str, found: Identified) -> None:
    from rich.table import Table

    speed = "remembered" if found.cached else f"{found.bytes / 1e6 / max(found.seconds, 1e-9):.0f} MB/s"
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("kind", kind)
    table.add_row("bytes", f"{found.bytes:,}")
    table.add_row("tensors", f"{found.tensors:,}")
    table.add_row("files", one_line(", ".join(found.files)))
    table.add_row("seconds", f"{found.seconds:.3f} ({speed})")
    # On the first line and whole, whatever the width: it is for copying.
    click.echo(found.identity)
    with page() as console:
        console.print(table)
