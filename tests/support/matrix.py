"""One tier against every dimension: stock, bound, and with one dimension withheld, in real engines.

A tier's engines run in this order: writers of the first provenance; readers that differ in one dimension; then the
weights are exchanged at their path, and readers of those follow. Keys of stock, bound and withheld engines never meet,
so one store serves all. Every reader has a provenance that nobody has written before its first request, so whatever
this one loads is foreign; its second one finds its own.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.engine import Answer, Engine, Launch
from tests.support.models import Models
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.provenance import COMPUTATIONAL, DIMENSIONS, Provenance, ask
from tests.support.steps import same
from tests.support.tiers import Opener, Tier

RESULTS = Path(__file__).parents[2] / "build" / "bindings" / "results.json"
FIRST = Provenance.of()
REQUEST = ("adapter", "sharing_domain")
WORKER = tuple(name for name in DIMENSIONS if name not in REQUEST)
PROMPTS = 4

Asked = tuple[list[Answer], int]
"""Answers, and how many tokens the engine says that it loaded from the store for them."""


def settle(_engine: Engine, *, seconds: float) -> None:
    """Wait for what the engine writes after it has answered."""
    time.sleep(seconds)


@dataclass
class Outcome:
    """What one engine was asked, in order, or how it died."""

    asked: list[Asked] = field(default_factory=list)
    died: EngineDiedError | None = None
    log: str = ""

    def __getitem__(self, index: int) -> Asked:
        if self.died is not None:
            raise self.died
        return self.asked[index]

    def loaded(self, index: int) -> int:
        return self[index][1]


References = Mapping[str, list[Answer]]
"""Answers of engines without a tier and without kvprov, by the dimension that differs; "" for the first provenance."""


def make_references(processes: Processes, models: Models, folder: Path) -> References:
    prompts = models.prompts(PROMPTS)
    second = models.copy_base(folder / "model")
    models.perturb(Path(second))
    names = ["", *DIMENSIONS]
    runs: list[tuple[Launch, Sequence[Step]]] = []
    for name in names:
        provenance = Provenance.of(*[name] if name else [])
        model = second if name == "weights" else models.base
        runs.append((provenance.launch(model, None, "off"), [provenance.ask(models, prompts)]))
    ended = processes.run_all(runs)
    references = {}
    for name, run in zip(names, ended, strict=True):
        assert isinstance(run, Run), run
        references[name] = run.results[0][0]
    for name in COMPUTATIONAL:
        # Else a foreign read could not be told from an own one. (Two types of element differ in the bytes: a cache of
        # the one that holds the other's has nothing to do with either.)
        assert name == "kv_representation" or not same(references[name], references[""]), name
    return references


ANOTHER_STORE = ("adapter", "sharing_domain", "weights")
"""What is withheld over a tier whose keys are those of another one, in another store. That withholding a dimension of
the configuration differs from withholding the weights, in the digest alone, is seen over that one."""


@dataclass
class Matrix:
    """All runs over one tier.

    Attributes:
        tier: The tier.
        loadable: How many tokens stock reads of its own entries.
        outcomes: By binding and the dimension that differs (or is withheld).
    """

    tier: Tier
    loadable: int
    tokens: int
    references: References
    outcomes: dict[tuple[str, str], Outcome]

    def rows(self, withheld: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Give the figures as `build/bindings/results.json` holds them."""
        for binding, names in (("unbound", DIMENSIONS), ("bound", DIMENSIONS), ("withheld", withheld)):
            for name in names:
                yield self._row(binding, name)

    def _row(self, binding: str, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"path": self.tier.name, "dimension": name, "binding": binding}
        outcome, first, second = self.where(binding, name)
        if binding != "bound" and self.failed(outcome, first, name):
            # Whether it dies or answers with nothing depends on the moment.
            return row | {
                "foreign_tokens": None,
                "own_tokens": None,
                "loadable_tokens": self.loadable,
                "matches_reference": False,
                "note": "the engine finds the foreign entry and fails on it",
            }
        return row | {
            "foreign_tokens": outcome.loaded(first),
            "own_tokens": None if second is None else outcome.loaded(second),
            "loadable_tokens": self.loadable,
            "matches_reference": same(outcome[first][0], self.references[name]),
            "note": "",
        }

    def failed(self, outcome: Outcome, place: int, name: str) -> bool:
        """Whether a foreign entry was found that the engine cannot read."""
        if name not in self.tier.dies:
            return False
        return outcome.died is not None or not same(outcome[place][0], self.references[name])

    def where(self, binding: str, name: str) -> tuple[Outcome, int, int | None]:
        """Return the run in which a dimension was varied, and at which places: its first request and its second."""
        if binding == "withheld":
            return self.outcomes[binding, name], 1 if name in REQUEST else 0, None
        if name in REQUEST:
            first = (2 if binding == "bound" else 1) + REQUEST.index(name) * (2 if binding == "bound" else 1)
            return self.outcomes[binding, "own"], first, first + 1 if binding == "bound" else None
        return self.outcomes[binding, name], 0, 1 if binding == "bound" else None


def _launch(tier: Tier, provenance: Provenance, model: str, mode: str, withhold: str = "") -> Launch:
    env = {**tier.env, **({"KVPROV_UNSAFE_WITHHOLD": withhold} if withhold else {})}
    args = {**tier.args, **provenance.args()}
    # A store folder of the launch's own is that of ExampleConnector; the tier says what takes its place.
    return Launch(model, Path("unused"), mode, env, args, tier.connector, before=tier.before)


def run_matrix(
    processes: Processes, models: Models, tier: Tier, folder: Path, references: References, withheld: Sequence[str]
) -> Matrix:
    """Run all engines over one tier, and keep the figures."""
    prompts = models.prompts(PROMPTS)
    model = models.copy_base(folder / "model")
    outcomes: dict[tuple[str, str], Outcome] = {}
    pending: list[tuple[tuple[str, str], Launch, list[Step]]] = []
    wait = partial(settle, seconds=tier.settle)
    renamed = partial(
        ask,
        prompts=prompts,
        adapter=models.adapter("standard", number=7, name="renamed", folder=folder / "renamed"),
        salt="tenant-1",
    )

    def asks(*names: str) -> Step:
        return Provenance.of(*names).ask(models, prompts)

    def add(key: tuple[str, str], provenance: Provenance, mode: str, *steps: Step, withhold: str = "") -> None:
        launch = _launch(tier, provenance, model, mode, withhold)
        pending.append((key, launch, list(steps)))

    def execute() -> None:
        ended = processes.run_all([(launch, steps) for _, launch, steps in pending])
        for (key, _, _), run in zip(pending, ended, strict=True):
            if isinstance(run, EngineDiedError):
                outcomes[key] = Outcome(died=run, log=run.log)
            else:
                outcomes[key] = Outcome([asked for asked in run.results if asked is not None], log=run.log)
        pending.clear()

    def readers(*names: str) -> None:
        for name in names:
            varied = Provenance.of(name)
            add(("bound", name), varied, "enforce", asks(name), wait, asks(name))
            add(("unbound", name), varied, "off", asks(name))
            if name in withheld:
                # Where only what is withheld differs, the entries of others are found; where the request differs, too,
                # they are not.
                more = [asks(name, other) for other in REQUEST]
                add(("withheld", name), varied, "enforce", asks(name), *more, withhold=name)

    add(("unbound", "seed"), FIRST, "off", asks(), wait)
    add(("bound", "seed"), FIRST, "enforce", asks(), wait)
    for name in WORKER:
        if name in withheld:
            add(("withheld seed", name), FIRST, "enforce", asks(), wait, withhold=name)
    execute()
    add(("unbound", "own"), FIRST, "off", asks(), *[asks(name) for name in REQUEST])
    twice = [step for name in REQUEST for step in (asks(name), wait, asks(name))]
    add(("bound", "own"), FIRST, "enforce", asks(), renamed, *twice)
    for name in REQUEST:
        if name in withheld:
            others = [asks(other) for other in REQUEST if other != name]
            add(("withheld", name), FIRST, "enforce", asks(), wait, asks(name), *others, withhold=name)
    readers(*[name for name in WORKER if name != "weights"])
    execute()
    models.perturb(Path(model))
    readers("weights")
    execute()
    loadable = outcomes["unbound", "own"].loaded(0)
    matrix = Matrix(tier, loadable, sum(map(len, prompts)), references, outcomes)
    record(matrix.rows(withheld))
    return matrix


def record(rows: Iterator[dict[str, Any]]) -> None:
    """Put rows into the file of results, in place of earlier ones of the same path, dimension and binding."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.with_suffix(".lock").open("w") as lock:
        # Several test processes add to the file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        merged = {(row["path"], row["dimension"], row["binding"]): row for row in [*kept, *rows]}
        ordered = [merged[key] for key in sorted(merged)]
        RESULTS.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")


class BindingMatrix:
    """The tests of one tier. A subclass names its opener, and what is withheld if it is not every dimension."""

    opener: ClassVar[Opener]
    withheld: ClassVar[Sequence[str]] = DIMENSIONS

    @pytest.fixture(scope="class")
    @classmethod
    def matrix(
        cls,
        processes: Processes,
        models: Models,
        references: References,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[Matrix]:
        folder = tmp_path_factory.mktemp("matrix")
        with cls.opener(folder) as tier:
            yield run_matrix(processes, models, tier, folder, references, cls.withheld)

    def test_own_state_is_read_in_full(self, matrix: Matrix) -> None:
        """The positive control of everything below: the identical rerun hits, bound as unbound, to the same end."""
        assert matrix.loadable >= 0.75 * matrix.tokens
        for binding in ("unbound", "bound"):
            assert matrix.outcomes[binding, "seed"].loaded(0) == 0
            answers, loaded = matrix.outcomes[binding, "own"][0]
            assert loaded == matrix.loadable
            assert same(answers, matrix.references[""])

    def test_an_adapter_of_other_name_path_and_id_shares(self, matrix: Matrix) -> None:
        answers, loaded = matrix.outcomes["bound", "own"][1]
        assert loaded == matrix.loadable
        assert same(answers, matrix.references[""])

    @pytest.mark.parametrize("name", DIMENSIONS)
    def test_stock(self, matrix: Matrix, name: str) -> None:
        """What stock shares wrongly, so that the bound case below can be told from it."""
        outcome, first, _ = matrix.where("unbound", name)
        if name in matrix.tier.dies:
            assert matrix.failed(outcome, first, name)
        elif name in matrix.tier.collides:
            assert outcome.loaded(first) == matrix.loadable
            # (On this CPU, attention reads a cache of either 16-bit type as the model's.)
            if name in COMPUTATIONAL and name != "kv_representation":
                assert not same(outcome[first][0], matrix.references[name])
        else:
            assert outcome.loaded(first) == 0

    @pytest.mark.parametrize("name", DIMENSIONS)
    def test_bound_reads_none_of_others_and_all_of_its_own(self, matrix: Matrix, name: str) -> None:
        outcome, first, second = matrix.where("bound", name)
        assert second is not None
        assert outcome.loaded(first) == 0
        assert outcome.loaded(second) == matrix.loadable
        for place in (first, second):
            assert same(outcome[place][0], matrix.references[name])

    @pytest.mark.parametrize("name", DIMENSIONS)
    def test_withholding_a_dimension_reopens_it_alone(self, matrix: Matrix, name: str) -> None:
        """Where stock's own key tells its values apart, it stays closed."""
        if name not in self.withheld:
            pytest.skip("it is withheld over another store with the same keys")
        outcome, first, _ = matrix.where("withheld", name)
        assert f"UNSAFE: withheld={name}" in outcome.log
        if name in matrix.tier.dies and self.reopens(matrix, name):
            assert matrix.failed(outcome, first, name)
            return
        assert outcome.loaded(first) == (matrix.loadable if self.reopens(matrix, name) else 0)
        for _, loaded in outcome.asked[first + 1 :]:
            assert loaded == 0

    def reopens(self, matrix: Matrix, name: str) -> bool:
        # kvprov's digest takes the place of the names and salts in stock's keys, so these are closed by nothing else.
        return name in REQUEST or name in matrix.tier.collides
