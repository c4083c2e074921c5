"""`kvprov explain`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from kvprov.cli.failure import UNSAFE, one_line
from kvprov.cli.output import json_file_option, write_json
from kvprov.cli.terminal import page
from kvprov.errors import LedgerError

if TYPE_CHECKING:
    from rich.console import Console

    from kvprov.ledger import Comparison, Forged, Ledger, Record, Resolved, Side

_SETTING: Final = "KVPROV_LEDGER"
_MAX_FIELDS: Final = 12


# Digests and names of entries may begin with a hyphen: nothing short is an option here, and what is unknown is a key.
@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("key", metavar="KEY_OR_DIGEST")
@click.argument("other", required=False)
@click.option("--ledger", "location", metavar="URL", help=f"A folder or fsspec URL. The default is {_SETTING}.")
@json_file_option
@click.pass_context
def explain(ctx: click.Context, key: str, other: str | None, location: str | None, json_file: str | None) -> None:
    """Say what a key was bound to, and what separates two.

    KEY_OR_DIGEST is a digest or a worker digest as it stands in keys, events and logs (43 or 22 characters), or a key
    or file name of LMCache. Workers with KVPROV_LEDGER record what their digests stand for. A record whose descriptor
    does not encode to its name is reported as forged and not used; then the exit code is 1.
    """
    from kvprov.ledger import Forged, Ledger, compare, resolve

    keys = [resolve(key)] if other is None else [resolve(key), resolve(other)]
    location = _location(location)
    ledger = Ledger(location)
    found = [_find(ledger, location, resolved) for resolved in keys]
    configs = _Configs(ledger)
    records = [record for record in found if not isinstance(record, Forged)]
    comparison = compare(records[0], records[1], configs) if len(records) == 2 else None
    report: dict[str, Any] = {
        "keys": [_key_json(*pair, configs) for pair in zip(keys, found, strict=True)],
        "comparison": None if comparison is None else _comparison_json(comparison),
    }
    report["forged"] = sorted({forged.file for forged in [*found, *configs.forged] if isinstance(forged, Forged)})
    if not write_json(report, json_file):
        with page() as console:
            for place, (resolved, record) in enumerate(zip(keys, found, strict=True)):
                _show(console, resolved, record, configs, "" if other is None else ("First: ", "Second: ")[place])
            if comparison is not None:
                _show_comparison(console, comparison, keys)
            for forged in configs.forged:
                console.print(
                    one_line(f"FORGED, not used: {forged.file}: {forged.reason}."), style="bold red", soft_wrap=True
                )
    if report["forged"]:
        ctx.exit(UNSAFE)


class _Configs:
    """Configurations by identity, each read once; forged ones are noted and not used."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._read: dict[str, Mapping[str, Any] | None] = {}
        self.forged: list[Forged] = []

    def __call__(self, identity: str) -> Mapping[str, Any] | None:
        from kvprov.ledger import Forged

        if identity not in self._read:
            config = self._ledger.config(identity)
            if isinstance(config, Forged):
                self.forged.append(config)
                config = None
            self._read[identity] = config
        return self._read[identity]


def _location(given: str | None) -> str:
    from kvprov.settings import load_settings

    # This setting alone: another that is wrong has no part in a ledger.
    setting = load_settings({name: value for name, value in os.environ.items() if name == _SETTING}).ledger
    if not (location := given or setting):
        raise LedgerError("No ledger is named.", f"Give --ledger, or set {_SETTING} as the workers have it.")
    return location


def _find(ledger: Ledger, location: str, resolved: Resolved) -> Record | Forged:
    from kvprov.ledger import shown_location

    found = ledger.find(resolved.text)
    if found is None:
        raise LedgerError(
            f"The ledger {shown_location(location)} does not know {resolved.text}.",
            "Check its path, and that workers record to it. Salts beyond a rate are not recorded, nor are requests "
            "whose provenance is not known, and a request with media may have a key of its own: explain the worker "
            "digest.",
        )
    return found


def _key_json(resolved: Resolved, found: Record | Forged, configs: _Configs) -> dict[str, Any]:
    from kvprov.ledger import Forged
    from kvprov.ledger.explain import describe

    key = {"text": resolved.text, "form": resolved.form, "rest": resolved.rest}
    if isinstance(found, Forged):
        return {**key, "state": "forged", "reason": found.reason}
    return {
        **key,
        "state": "worker" if found.worker_only else "known",
        "digest": found.text,
        "dimensions": [asdict(side) for side in describe(found, configs)],
        "said_by_the_writer": {"facts": dict(found.facts), "names": dict(found.names)},
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "same": comparison.same,
        "words": comparison.words,
        "only_worker_halves": comparison.only_worker_halves,
        "separations": [asdict(separation) for separation in comparison.separations],
    }


def _show(console: Console, resolved: Resolved, found: Record | Forged, configs: _Configs, title: str) -> None:
    from rich.table import Table

    from kvprov.ledger import Forged
    from kvprov.ledger.explain import describe

    console.print(one_line(f"{title}{resolved.text} ({resolved.form})"), style="bold")
    if isinstance(found, Forged):
        console.print(
            "  " + one_line(f"FORGED, not used: {found.file}: {found.reason}."), style="bold red", soft_wrap=True
        )
        return
    if found.worker_only:
        console.print("  a worker digest: what a worker is, whatever its requests")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for side in describe(found, configs):
        table.add_row("", side.dimension, one_line(side.words))
        if side.identity is not None:
            table.add_row("", "", side.identity)
        for row in _fields(side):
            table.add_row("", "", one_line(row))
    console.print(table)
    said = ", ".join(f"{name} {text}" for name, text in found.facts.items())
    console.print(
        one_line(f"  Its writer says of itself, and nothing vouches for it: {said or 'nothing'}."), soft_wrap=True
    )
    if resolved.rest:
        console.print(
            one_line(f"  Beside the digest, the key holds tokens and path facts: {resolved.rest}"), soft_wrap=True
        )
    console.print()


def _fields(side: Side) -> list[str]:
    if side.fields is None:
        return []
    rows = [f"{path} = {value}" for path, value in side.fields.items()]
    more = len(rows) - _MAX_FIELDS
    return rows if more <= 0 else [*rows[:_MAX_FIELDS], f"and {more} more: see --json"]


def _show_comparison(console: Console, comparison: Comparison, keys: list[Resolved]) -> None:
    console.print(one_line(comparison.words), style="bold")
    for separation in comparison.separations:
        kind = f" ({separation.kind})" if separation.kind else ""
        console.print("  " + one_line(f"{separation.dimension}{kind}: {separation.words}."), soft_wrap=True)
    if comparison.same and keys[0].rest != keys[1].rest:
        console.print("  The keys differ beside the digest: in tokens or in path facts.")
