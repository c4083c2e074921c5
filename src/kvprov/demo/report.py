"""The demo's report: one HTML file that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvprov.demo import words
from kvprov.demo.plan import REFERENCE
from kvprov.demo.results import Outcome, Results, percent

# The picture's measures, in units of its own, of which a phone shows about one a pixel.
HEADING: Final = 34
LANE: Final = 46
GAP: Final = 34
WIDTH: Final = 350


@dataclass(frozen=True, slots=True)
class Lane:
    """One arrow of the picture: what a reader was served of one writer's state.

    Attributes:
        writer: Who wrote the state.
        tokens: How much of it the reader was served.
        kind: `own`, `foreign`, or `none` when nothing was served.
        y: Where it is.
    """

    writer: str
    tokens: int
    kind: str
    y: int


@dataclass(frozen=True, slots=True)
class Scene:
    """One read in the picture: a store, a reader, and an arrow for each writer whose state the store held."""

    title: str
    reader: str
    detail: str
    accuracy: str
    lanes: tuple[Lane, ...]
    top: int
    bottom: int

    @property
    def middle(self) -> int:
        """Half way down."""
        return (self.top + self.bottom) // 2

    @property
    def text(self) -> str:
        """What it shows, in a sentence."""
        served = " and ".join(f"{lane.tokens:,} tokens that {lane.writer} had written" for lane in self.lanes)
        return f"{self.title}: {self.reader} was served {served}; its accuracy was {self.accuracy}."


@dataclass(frozen=True, slots=True)
class Heading:
    """A line of the picture above its scenes."""

    text: str
    y: int


@dataclass(frozen=True, slots=True)
class Picture:
    """What was read by whom."""

    headings: tuple[Heading, ...]
    scenes: tuple[Scene, ...]
    height: int
    width: int = WIDTH


def _lane(outcome: Outcome, writer: str, y: int) -> Lane:
    tokens = outcome.tokens_read.get(writer, 0)
    kind = "none" if not tokens else "own" if writer == outcome.process.adapter.worker else "foreign"
    return Lane(writer, tokens, kind, y)


def picture(results: Results) -> Picture:
    """Lay out the picture."""
    headings, scenes = [], []
    y = 0
    bound: bool | None = None
    for outcome in results.phases:
        if outcome.process.store is None:
            continue
        if outcome.process.bound != bound:
            bound = outcome.process.bound
            headings.append(Heading("With kvprov" if bound else "Without kvprov", y + 20))
            y += HEADING
        writers = sorted(set(outcome.tokens_offered) | set(outcome.tokens_read))
        top = y + GAP - 8
        lanes = tuple(_lane(outcome, writer, top + LANE * i + LANE // 2) for i, writer in enumerate(writers))
        bottom = top + LANE * max(len(lanes), 1)
        scenes.append(
            Scene(
                title=outcome.process.title,
                reader=outcome.process.adapter.worker,
                detail=f"as “{outcome.process.adapter.name}”",
                accuracy=percent(results.accuracy(outcome)),
                lanes=lanes,
                top=top,
                bottom=bottom,
            )
        )
        y = bottom + 14
    return Picture(tuple(headings), tuple(scenes), y)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    step: str
    accuracy: str
    agreement: str
    own: str
    foreign: str
    seconds: str
    harmed: bool


def rows(results: Results) -> list[Row]:
    """Return the table's rows."""
    return [
        Row(
            step=words.step(phase.process),
            accuracy=percent(results.accuracy(phase)),
            agreement=f"{results.agreed(phase)} of {len(results.wanted)}",
            own="–" if phase.process.name == REFERENCE else f"{phase.tokens_own:,}",
            foreign="–" if phase.process.name == REFERENCE else f"{phase.tokens_foreign:,}",
            seconds=f"{phase.seconds:.0f}",
            harmed=phase.tokens_foreign > 0,
        )
        for phase in results.phases
    ]


def render(results: Results) -> str:
    """Return the report."""
    environment = Environment(
        loader=PackageLoader("kvprov.demo", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        headline=words.headline(results),
        holds=results.holds(),
        claims=results.claims(),
        picture=picture(results),
        rows=rows(results),
        reviews=len(results.wanted),
        prompt_tokens=results.phase(REFERENCE).prompt_tokens,
        processes=[(words.step(outcome.process), outcome.process.name) for outcome in results.outcomes],
        versions=results.versions,
        seconds=f"{results.seconds:.0f}",
    )
