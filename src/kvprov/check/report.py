"""A report in words, and as one HTML file that needs nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvprov.check.results import Judged, Pair, Report
from kvprov.check.verdicts import Verdict

BAR_HEIGHT: Final = 40


def number(value: float | None) -> str:
    """Return a difference in three digits; what cannot be read has none."""
    if value is None:
        return "unreadable"
    return "no number" if math.isinf(value) else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Row:
    """A dimension in the table.

    Attributes:
        name: The dimension.
        verdict: What is said of it.
        pairs: How many pairs were judged.
        keys: How many keys were tried beside.
        largest: Largest absolute difference between what two values store.
        where: Where that is.
        tokens: How many tokens it affects, of how many.
    """

    name: str
    verdict: Verdict
    pairs: int
    keys: int
    largest: str
    where: str
    tokens: str


def _where(pair: Pair) -> str:
    place = None if pair.difference is None else pair.difference.place
    return "" if place is None else f"layer {place.layer}, head {place.head}, token {place.token}, {place.part}"


def rows(report: Report) -> list[Row]:
    """Return the table's rows."""
    found = []
    for judged in report.dimensions:
        worst = judged.worst
        difference = None if worst is None else worst.difference
        found.append(
            Row(
                name=judged.dimension.name + (" (withheld)" if judged.withheld else ""),
                verdict=judged.verdict,
                pairs=len(judged.pairs),
                keys=sum(trial.keys for trial in judged.trials),
                largest="" if difference is None else number(difference.largest),
                where="" if worst is None else _where(worst),
                tokens="" if difference is None else f"{difference.tokens} of {report.tokens}",
            )
        )
    return found


def headline(report: Report) -> str:
    """Return the result in a sentence or two."""
    control = report.control
    if not control.state:
        return "Cannot judge: two runs of one configuration gave different bytes, so a difference proves nothing."
    if not control.key:
        return "Cannot judge: one configuration has another key each time, so nothing is shared and nothing is proven."
    omitted = report.having(Verdict.OMISSION)
    untested = report.having(Verdict.NOT_TESTED)
    said = (
        f"The key omits {', '.join(omitted)}: foreign state would be served."
        if omitted
        else "The key omits no dimension that was tested."
    )
    if separated := report.having(Verdict.OVER_SEPARATED):
        said += f" It separates needlessly: {', '.join(separated)}."
    if untested:
        said += f" Not tested: {', '.join(untested)}."
    return said


def left_out(report: Report) -> list[str]:
    """Return a sentence for each dimension that was left out in turn."""
    lines = []
    for name, verdicts in report.left_out.items():
        reopened = [other for other, verdict in verdicts.items() if verdict is Verdict.OMISSION]
        if name in report.unexpected:
            lines.append(f"DOES NOT HOLD  Leaving out {name} reopens {', '.join(reopened) or 'nothing'}.")
        else:
            lines.append(f"Leaving out {name} reopens exactly that.")
    return lines


@dataclass(frozen=True, slots=True)
class Bar:
    """A layer's largest difference in the picture, in its units.

    Attributes:
        height: Of the bar, as a part of the largest layer's.
        text: What it shows.
    """

    height: float
    text: str


def bars(judged: Judged) -> list[Bar]:
    """Return a bar for each layer of the pair whose state differs most."""
    worst = judged.worst
    if worst is None or worst.difference is None or not worst.difference.largest:
        return []
    finite = [value for value in worst.difference.layers if math.isfinite(value)]
    top = max(finite, default=0.0) or 1.0
    return [
        Bar(BAR_HEIGHT * (min(value / top, 1.0) if math.isfinite(value) else 1.0), f"layer {i}: {number(value)}")
        for i, value in enumerate(worst.difference.layers)
    ]


def render(report: Report) -> str:
    """Return the report as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kvprov.check", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        headline=headline(report),
        rows=list(zip(rows(report), report.dimensions, strict=True)),
        left_out=left_out(report),
        bars=bars,
        bar_height=BAR_HEIGHT,
        number=number,
        where=_where,
        seconds=f"{report.seconds:.0f}",
    )
