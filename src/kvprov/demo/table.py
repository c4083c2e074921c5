"""The demo's table on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvprov.demo import words
from kvprov.demo.results import Results, percent


def _table(results: Results) -> Table:
    table = Table(
        title="What worker B was served, and how well it answered",
        caption="A and B run one model with two adapters that want opposite answers to the same prompts.\n"
        "Own: state that B's adapter wrote. Foreign: state that A's adapter wrote.",
    )
    table.add_column("Step", min_width=26)
    for name in ("Accuracy", "Answers\nas alone", "Own\ntokens", "Foreign\ntokens"):
        table.add_column(name, justify="right", no_wrap=True)
    group = None
    for phase in results.phases:
        alone = phase.process.store is None
        if not alone and phase.process.bound != group:
            group = phase.process.bound
            table.add_section()
            table.add_row(f"[bold]{'With' if group else 'Without'} kvprov")
        foreign = f"{phase.tokens_foreign:,}"
        table.add_row(
            escape(phase.process.title if alone else f"  {phase.process.title}"),
            percent(results.accuracy(phase)),
            f"{results.agreed(phase)} of {len(results.wanted)}",
            "-" if alone else f"{phase.tokens_own:,}",
            "-" if alone else f"[bold red]{foreign}" if phase.tokens_foreign else foreign,
        )
    return table


def show(results: Results, console: Console, output: Path) -> None:
    """Print the table, the headline, and each claim that does not hold."""
    console.print()
    console.print(_table(results))
    console.print()
    for line in words.headline(results):
        console.print(line, markup=False, highlight=False)
    claims = results.claims()
    failed = [claim for claim in claims if not claim.holds]
    console.print()
    if failed:
        for claim in failed:
            console.print(f"DOES NOT HOLD  {claim.statement}. {claim.measured}.", style="red", markup=False)
    else:
        console.print(f"All {len(claims)} claims hold.", style="green", highlight=False)
    console.print(f"Took {results.seconds:.0f} s. Report: {output / 'report.html'}", markup=False, highlight=False)
    console.print(f"Numbers: {output / 'results.json'}", markup=False, highlight=False)
