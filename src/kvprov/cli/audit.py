"""`kvprov audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvprov.check.audit.report import EngineReport, Report, Row
from kvprov.check.audit.run import ENGINES, run
from kvprov.check.audit.scenario import DIMENSIONS
from kvprov.check.audit.verdict import Cell, Verdict
from kvprov.cli.failure import ENGINE, UNSAFE, one_line
from kvprov.cli.output import json_file_option, write_json
from kvprov.cli.terminal import page, status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES: Final = {
    Verdict.BOUND: "green",
    Verdict.OMITTED: "bold red",
    Verdict.CARRIED: "red",
    Verdict.TRUNCATED: "yellow",
    Verdict.NOT_APPLICABLE: "dim",
}
_WIDTH: Final = 160
"""Columns where the output is no terminal: a table that is folded to eighty cannot be read."""


@click.command()
@click.option(
    "--engine",
    "engines",
    type=click.Choice(sorted(ENGINES)),
    multiple=True,
    help="Audit this engine alone. May be repeated; without any, all that are installed.",
)
@json_file_option
@click.pass_context
def audit(ctx: click.Context, engines: tuple[str, ...], json_file: str | None) -> None:
    """Find what the keys of each connector leave out, by running its own key code.

    Needs no model and no GPU. Each connector of the installed engines makes keys of made-up workers and requests that
    differ in one fact; as it is, and with kvprov in effect. Nothing is read from or written to a store.

    Exits with 1 when an engine has a connector that the audit does not know, or when a bound key leaves something
    out; with 3 when a connector or an engine could not be judged, or none is installed. What stock keys leave out is
    reported, and no reason to fail.
    """
    with status("Auditing; importing an engine takes about ten seconds ..."):
        report = run(engines)
    if not write_json(report.to_json(), json_file):
        with page() as console:
            _show(console, report)
    if report.findings:
        ctx.exit(UNSAFE)
    if report.failures or not report.engines or (engines and report.missing):
        ctx.exit(ENGINE)


def _show(console: Console, report: Report) -> None:
    if not console.is_terminal:
        console.width = _WIDTH
    for engine in report.engines:
        _show_engine(console, engine)
    for name in report.missing:
        console.print(f"{name} is not installed here, so it was not audited.")
    for line in [*report.findings, *report.failures]:
        console.print(one_line(line), style="bold red")
    if not report.engines:
        console.print("No engine was audited. Run this in an environment that has the engine.", style="bold red")
    elif report.findings:
        console.print("Unsafe.", style="bold red")
    elif report.failures:
        console.print("Unknown: not everything could be judged.", style="bold red")
    else:
        console.print("Every connector is known, and no bound key leaves anything out.", style="bold green")


def _show_engine(console: Console, engine: EngineReport) -> None:
    from rich.table import Table

    console.print(f"{engine.engine}: " + ", ".join(f"{name} {number}" for name, number in engine.versions.items()))
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for header in ("connector", "keys", *DIMENSIONS):
        table.add_column(header, overflow="fold")
    for row in engine.rows:
        for name, cells, otherwise in _halves(row):
            shown = ["-"] * len(DIMENSIONS) if cells is None else [_cell(cells[name]) for name in DIMENSIONS]
            table.add_row(one_line(row.name) if name == "stock" else "", name, *shown)
            if cells is None and otherwise:
                table.add_row("", "", one_line(otherwise))
    if engine.rows:
        console.print(table)
    notes = [(row.name, row.note) for row in engine.rows if row.note]
    for title, items in (
        ("Notes", notes),
        ("Not audited", list(engine.refused.items())),
        ("Not installed", list(engine.skipped.items())),
    ):
        if items:
            console.print(title, style="bold")
            for name, why in items:
                console.print("  " + one_line(f"{name}: {why}"))
    console.print()


def _halves(row: Row) -> list[tuple[str, dict[str, Cell] | None, str]]:
    native = None if row.native is None else dict(row.native)
    bound = None if row.bound is None else dict(row.bound)
    return [("stock", native, row.error), ("bound", bound, row.unbound)]


def _cell(cell: Cell) -> Text:
    from rich.text import Text

    return Text(one_line(cell.text), style=_STYLES[cell.verdict])
