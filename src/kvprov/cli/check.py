"""`kvprov check`."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvprov.check.errors import MissingPackageError
from kvprov.check.keys import BOUND
from kvprov.check.report import headline, left_out, rows
from kvprov.check.results import Report
from kvprov.check.run import Checker
from kvprov.check.steps import rich_steps
from kvprov.check.verdicts import Verdict
from kvprov.cli.failure import WANTS_JSON, one_line
from kvprov.cli.terminal import page
from kvprov.errors import BindingError
from kvprov.fleet import fleet_secret
from kvprov.identity.digest_cache import default_cache
from kvprov.settings import load_settings

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: Final = {
    Verdict.OMISSION: "bold red",
    Verdict.OVER_SEPARATED: "yellow",
    Verdict.SOUND: "green",
    Verdict.SHARED: "green",
    Verdict.NOT_TESTED: "dim",
}
_STDOUT: Final = "-"

_FILE = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=str)


def _note(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    ctx.meta[WANTS_JSON] = value == _STDOUT
    return value


@click.command()
@click.argument("model")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="DIR",
    help="A LoRA adapter of the model. May be repeated; without any, two are generated.",
)
@click.option(
    "--weights",
    "weights",
    multiple=True,
    metavar="DIR",
    help="Another checkpoint of the model's shape. May be repeated; without any, the model's weights are perturbed.",
)
@click.option(
    "--space", type=click.Path(path_type=Path), metavar="FILE", help="Further values to compare, in TOML or JSON."
)
@click.option(
    "--key",
    default=BOUND,
    show_default=True,
    metavar="bound|content-only|NAME",
    help="The key function; NAME is one to import, as in acme_kv.keys:key.",
)
@click.option("--withhold", multiple=True, metavar="DIM", help="Leave a dimension out of the binding. May be repeated.")
@click.option(
    "--leave-one-out", is_flag=True, help="Also leave out each dimension in turn: exactly that one must be omitted."
)
@click.option(
    "--json",
    "json_file",
    type=_FILE,
    is_eager=True,
    callback=_note,
    metavar="FILE",
    help="Write the report as JSON; - is stdout.",
)
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write the report as HTML.")
@click.pass_context
def check(
    ctx: click.Context,
    model: str,
    adapters: tuple[str, ...],
    weights: tuple[str, ...],
    space: Path | None,
    key: str,
    withhold: tuple[str, ...],
    leave_one_out: bool,
    json_file: str | None,
    html_file: str | None,
) -> None:
    """Find what changes KV state and not the key.

    Runs MODEL (a folder, or a hub id in the local cache) on the CPU in float32, with values that differ in one
    dimension at a time, and asks the key function whether their keys differ. Needs torch and transformers.

    Exits with 1 on an omission, and with 4 when the check cannot judge: one configuration, run twice, gave other bytes
    or another key.
    """
    if leave_one_out and key != BOUND:
        raise click.UsageError(f"--leave-one-out is of kvprov's own key; leave out --key {key}.", ctx)
    began = time.monotonic()
    settings = load_settings()
    try:
        with Checker(
            model,
            adapters=adapters,
            weights=weights,
            space=space,
            secret=fleet_secret(settings),
            bits=settings.digest_bits,
            withhold=(*settings.unsafe_withhold, *withhold),
            cache=default_cache(),
            steps=rich_steps(),
        ) as checker:
            report = checker.judge(key)
            if leave_one_out and report.control.passed:
                left_out_one = checker.leave_one_out()
                report = replace(report, left_out=left_out_one, seconds=time.monotonic() - began)
    except MissingPackageError as error:
        # Its exit code is that of an engine which is not there.
        raise BindingError(error.message, error.advice) from error
    if html_file is not None:
        from kvprov.check.report import render

        _write(html_file, render(report))
    if json_file is not None:
        _write(json_file, json.dumps(report.to_json(), indent=2) + "\n")
    if _STDOUT not in (json_file, html_file):
        with page() as console:
            _show(console, report)
    ctx.exit(report.exit_code)


def _write(file: str, text: str) -> None:
    with click.open_file(file, "w", encoding="utf-8", atomic=file != _STDOUT) as out:
        out.write(text)


def _show(console: Console, report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(
        one_line(
            f"{report.key} on {report.model}: {report.layers} layers, {report.tokens} tokens, {report.seconds:.0f} s"
        )
    )
    console.print()
    table = Table.grid(padding=(0, 2))
    table.add_row("dimension", "verdict", "pairs", "largest", "tokens", "where", style="dim")
    for row in rows(report):
        # The first part of the place: the rest is in the other reports.
        where = row.where.rpartition(", ")[0]
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(row.name, verdict, str(row.pairs or ""), row.largest, row.tokens, where)
    console.print(table)
    for finding in report.all_findings:
        console.print()
        title = one_line(f"{finding.dimension}: {finding.fault}")
        console.print(Text(title, style=_STYLES[finding.verdict]))
        console.print(one_line(finding.message))
    for judged in report.dimensions:
        if judged.note:
            console.print()
            console.print(one_line(f"{judged.dimension.name} is not tested. {judged.note}"))
    if report.left_out:
        console.print()
        for line in left_out(report):
            console.print(one_line(line))
    console.print()
    good = report.exit_code == 0 and not report.having(Verdict.OVER_SEPARATED)
    console.print(one_line(headline(report)), style="bold green" if good else "bold red")
