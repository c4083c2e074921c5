"""Real workers that differ in one dimension write the same documents, and their stores are compared.

Three bindings are looked at: none (the engine's own keys), the complete one, and the complete one less one dimension at
a time. Each worker has a store of its own, so that what it writes is what it computed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from kvprov.check.store.diff import StoreDiff, diff_stores
from kvprov.contract.dimension import Kind
from kvprov.contract.dimensions import BUILT_IN
from kvprov.errors import StoreError

UNBOUND: Final = "unbound"
COMPLETE: Final = "complete"
FIRST: Final = "first"
AGAIN: Final = "again"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker that is to write the documents, and end.

    Attributes:
        binding: `unbound`, `complete`, or the dimension that the binding leaves out.
        differs: The dimension in which it differs from the first worker, or None: the first one, and the same again.
        store: An empty folder for its entries.
    """

    binding: str
    differs: str | None
    store: Path

    @property
    def name(self) -> str:
        """A name for logs."""
        return f"{self.binding}-{self.store.name}"

    def settings(self) -> dict[str, str]:
        """Return the `KVPROV_*` settings that make its binding."""
        if self.binding == UNBOUND:
            return {"KVPROV_MODE": "off"}
        withheld = {} if self.binding == COMPLETE else {"KVPROV_UNSAFE_WITHHOLD": self.binding}
        return {"KVPROV_MODE": "enforce", **withheld}


class Fleet(Protocol):
    """Starts workers of one engine over one connector.

    Attributes:
        title: Engine and connector, for people.
        dimensions: In which its workers can differ.
    """

    title: str
    dimensions: Sequence[str]

    def write(self, workers: Sequence[Worker]) -> None:
        """Let each worker write the documents to its store, in any order, and end it.

        Raises:
            KvprovError: A worker could not be run.
        """


class Outcome(enum.StrEnum):
    """What a binding does to a dimension."""

    SEPARATED = "separated"
    """Workers that differ in it share no key."""
    COLLIDES = "collides"
    """They share a key under which they wrote different bytes."""
    SHARED = "shared"
    """They share keys, with the same bytes: harmless, unless the dimension is one of permission."""
    UNDECIDED = "undecided"
    """They share keys, and an entry could not be compared, or they wrote nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """Two workers that differ in one dimension, under one binding.

    Attributes:
        binding: As in `Worker`.
        dimension: The one in which they differ.
        diff: Their stores, compared.
    """

    binding: str
    dimension: str
    diff: StoreDiff

    @property
    def outcome(self) -> Outcome:
        """What the binding does to the dimension."""
        if self.diff.collisions:
            return Outcome.COLLIDES
        if self.diff.undecided or not self.diff.only_first + self.diff.shared:
            return Outcome.UNDECIDED
        return Outcome.SHARED if self.diff.shared else Outcome.SEPARATED

    @property
    def expected(self) -> frozenset[Outcome]:
        """What a sound binding may come to here; anything, where there is none."""
        if self.binding == UNBOUND:
            return frozenset(Outcome)
        if self.binding != self.dimension:
            return frozenset({Outcome.SEPARATED})
        # Without the dimension that differs, keys meet again: the binding took the native names of its values away.
        permission = self.dimension in BUILT_IN and BUILT_IN[self.dimension].kind is Kind.PERMISSION
        return frozenset({Outcome.SHARED if permission else Outcome.COLLIDES})

    @property
    def sound(self) -> bool:
        """Whether it came to what it should."""
        return self.outcome in self.expected

    def to_json(self) -> dict[str, Any]:
        """Return the row as a report has it."""
        found = self.diff.to_json()
        counts = {key: found[key] for key in ("shared", "equal", "within_tolerance", "collisions", "undecided")}
        largest = [f["largest_difference"] for f in found["colliding"] if isinstance(f["largest_difference"], float)]
        return {
            "binding": self.binding,
            "dimension": self.dimension,
            "outcome": str(self.outcome),
            "sound": self.sound,
            **counts,
            "largest_difference": max(largest, default=None),
        }


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """What all workers came to.

    Attributes:
        title: Engine and connector.
        control: The first worker and the same once more, unbound: what two runs of one configuration differ in.
        rows: Pair by pair.
    """

    title: str
    control: StoreDiff
    rows: tuple[Row, ...]

    @property
    def judged(self) -> bool:
        """Whether two runs of one configuration wrote the same: else nothing can be told from the rest."""
        return self.control.shared > 0 and self.control.shared == self.control.equal + self.control.within

    @property
    def sound(self) -> bool:
        """Whether every bound pair came to what it should."""
        return self.judged and all(row.sound for row in self.rows)

    @property
    def words(self) -> str:
        """The outcome, in a sentence."""
        if not self.judged:
            return (
                "Nothing can be told: two runs of one configuration do not write the same. See --tolerance."
                if self.control.shared
                else "Nothing can be told: two runs of one configuration share no key, or wrote none."
            )
        wrong = [f"{row.dimension} ({row.binding})" for row in self.rows if not row.sound]
        if wrong:
            return f"Not as it should be: {', '.join(wrong)}."
        reopened = [row.dimension for row in self.rows if row.binding == row.dimension]
        return (
            "The complete binding separates every pair, and withholding a dimension reopens that one alone"
            f" ({', '.join(reopened)})."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report."""
        return {
            "title": self.title,
            "words": self.words,
            "judged": self.judged,
            "sound": self.sound,
            "control": self.control.to_json(),
            "rows": [row.to_json() for row in self.rows],
        }


def _workers(dimensions: Sequence[str], folder: Path) -> Iterator[Worker]:
    for binding in (UNBOUND, COMPLETE, *dimensions):
        yield Worker(binding, None, folder / binding / FIRST)
        if binding == UNBOUND:
            yield Worker(binding, None, folder / binding / AGAIN)
        for dimension in dimensions:
            yield Worker(binding, dimension, folder / binding / dimension)


def check_stores(
    fleet: Fleet,
    folder: Path,
    *,
    dimensions: Sequence[str] = (),
    tolerance: float | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> StoreCheck:
    """Let workers of `fleet` write to stores in `folder`, and compare these.

    Args:
        fleet: Starts the workers.
        folder: A folder without stores in it.
        dimensions: In which workers are to differ; by default all that the fleet can vary.
        tolerance: See `diff_stores`.
        progress: Told what is done next.

    Raises:
        StoreError: A dimension is not one that the fleet can vary, or a store cannot be read.
        KvprovError: A worker could not be run.
    """
    chosen = tuple(dict.fromkeys(dimensions or fleet.dimensions))
    for name in chosen:
        if name not in fleet.dimensions:
            raise StoreError(
                f"Workers of {fleet.title} cannot be made to differ in {name!r:.80}.",
                f"Dimensions are: {', '.join(fleet.dimensions)}.",
            )
    workers = list(_workers(chosen, folder))
    for worker in workers:
        worker.store.mkdir(parents=True)
    progress(f"{len(workers)} workers write")
    fleet.write(workers)
    progress("comparing")

    def diff(binding: str, other: str) -> StoreDiff:
        one, two = folder / binding / FIRST, folder / binding / other
        return diff_stores(one, two, tolerance=tolerance, may_be_empty=True)

    control = diff(UNBOUND, AGAIN)
    rows = tuple(Row(b, d, diff(b, d)) for b in (UNBOUND, COMPLETE, *chosen) for d in chosen)
    return StoreCheck(fleet.title, control, rows)
