"""Each dimension alone, in pairs and all at once: two processes, one store, ExampleConnector.

One fixture runs all engines: seeders first, then the weights are exchanged at their path, then the readers of the
other weights. Each read gets a fresh copy of the store, whose only writer is the seeder, so every token that a reader
of another provenance loads is foreign.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.engine import Answer, Launch
from tests.support.matrix import record
from tests.support.models import Models, loadable
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.provenance import COMPUTATIONAL, DIMENSIONS, Provenance, copied

pytestmark = pytest.mark.engine

FIRST = Provenance.of()
ALL = Provenance.of(*DIMENSIONS)
SINGLES = {name: Provenance.of(name) for name in DIMENSIONS}
PAIRS = {f"{a}+{b}": Provenance.of(a, b) for a, b in itertools.combinations(DIMENSIONS, 2)}
RESULTS = Path(__file__).parents[2] / "build" / "dimensions" / "results.json"


@dataclass
class Read:
    """What one reader got."""

    answers: list[Answer]
    loaded: int
    log: str


@dataclass
class Matrix:
    """All runs, by what they were."""

    loadable: int
    prompts: list[list[int]]
    reads: dict[tuple[str, ...], Read | EngineDiedError] = field(default_factory=dict)

    def __getitem__(self, key: tuple[str, ...]) -> Read:
        read = self.reads[key]
        if isinstance(read, EngineDiedError):
            raise read
        return read


class _Plan:
    """Collects runs and executes them, some at a time."""

    def __init__(self, processes: Processes, matrix: Matrix) -> None:
        self._processes = processes
        self._matrix = matrix
        self._pending: list[tuple[tuple[str, ...], Launch, Step]] = []

    def add(self, key: tuple[str, ...], launch: Launch, step: Step) -> None:
        self._pending.append((key, launch, step))

    def execute(self) -> None:
        ended = self._processes.run_all([(launch, [step]) for _, launch, step in self._pending])
        for (key, _, _), run in zip(self._pending, ended, strict=True):
            if isinstance(run, Run):
                answers, hits = run.results[0]
                # Two independent counts of the engine: per request, and its metric.
                assert hits == sum(answer.loaded for answer in answers)
                self._matrix.reads[key] = Read(answers, hits, run.log)
            else:
                self._matrix.reads[key] = run
        self._pending.clear()


@pytest.fixture(scope="module")
def matrix(processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("dimensions")
    model = models.copy_base(folder / "model")
    prompts = models.prompts(16)
    result = Matrix(sum(loadable(len(prompt)) for prompt in prompts), prompts)
    plan = _Plan(processes, result)

    def seed(name: str, mode: str, withhold: str = "") -> Path:
        store = folder / name
        store.mkdir()
        plan.add(("seed", name), FIRST.launch(model, store, mode, withhold), FIRST.ask(models, prompts))
        return store

    def read(key: tuple[str, ...], provenance: Provenance, store: Path | None, mode: str, withhold: str = "") -> None:
        plan.add(key, provenance.launch(model, store, mode, withhold), provenance.ask(models, prompts))

    unbound, bound = seed("unbound", "off"), seed("bound", "enforce")
    withheld = {name: seed(f"withheld-{name}", "enforce", name) for name in DIMENSIONS}
    plan.execute()

    everything = {**SINGLES, **PAIRS, "all": ALL}
    again: list[tuple[tuple[str, ...], Provenance, Path]] = []

    def plan_readers(second_weights: bool) -> None:
        if not second_weights:
            read(("reference", "first"), FIRST, None, "off")
            read(("own", "unbound"), FIRST, copied(unbound, "own"), "off")
            read(("own", "bound"), FIRST, copied(bound, "own"), "enforce")
        for name, provenance in everything.items():
            if ("weights" in provenance.differs) is not second_weights:
                continue
            store = copied(bound, name)
            read(("bound", name), provenance, store, "enforce")
            if name not in PAIRS:
                read(("reference", name), provenance, None, "off")
                read(("unbound", name), provenance, copied(unbound, name), "off")
                again.append((("own", name), provenance, store))
        for name, store in withheld.items():
            for other, provenance in SINGLES.items():
                if ("weights" in provenance.differs) is second_weights:
                    read(("withheld", name, other), provenance, copied(store, other), "enforce", name)
        plan.execute()
        for key, provenance, store in again:
            read(key, provenance, store, "enforce")
        again.clear()
        plan.execute()

    plan_readers(second_weights=False)
    models.perturb(Path(model))
    plan_readers(second_weights=True)
    _write(result)
    return result


def _write(matrix: Matrix) -> None:
    """Keep the figures, for people."""

    def row(key: tuple[str, ...]) -> dict[str, object]:
        read = matrix.reads[key]
        if isinstance(read, EngineDiedError):
            return {"run": list(key), "died": read.message}
        reference = matrix.reads.get(("reference", key[-1] if key[0] != "seed" else "first"))
        equal = read.answers == reference.answers if isinstance(reference, Read) else None
        return {"run": list(key), "loaded": read.loaded, "equals_reference": _same(read, reference), "bitwise": equal}

    rows = [row(key) for key in matrix.reads]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"loadable": matrix.loadable, "rows": rows}, indent=1) + "\n")
    record(_binding(matrix, binding, name) for binding in ("unbound", "bound", "withheld") for name in DIMENSIONS)


def _binding(matrix: Matrix, binding: str, name: str) -> dict[str, object]:
    """Return one row of the file that holds the figures of all tiers."""
    row: dict[str, object] = {"path": "example", "dimension": name, "binding": binding}
    read = matrix.reads[("withheld", name, name) if binding == "withheld" else (binding, name)]
    if isinstance(read, EngineDiedError):
        figures: tuple[int | None, bool | None] = None, False
    else:
        figures = read.loaded, _same(read, matrix.reads[("reference", name)])
    return row | {
        "foreign_tokens": figures[0],
        "own_tokens": matrix["own", name].loaded if binding == "bound" else None,
        "loadable_tokens": matrix.loadable,
        "matches_reference": figures[1],
        "note": "" if figures[0] is not None else "the engine finds the foreign entry and fails on it",
    }


def _same(read: Read, reference: Read | EngineDiedError | None) -> bool | None:
    """Whether tokens and log probabilities are the reference's, the latter to within rounding."""
    if not isinstance(reference, Read):
        return None
    return all(
        a.tokens == b.tokens and all(abs(x - y) < 1e-4 for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in zip(read.answers, reference.answers, strict=True)
    )


def test_prompts_are_worth_loading(matrix: Matrix) -> None:
    assert len(matrix.prompts) >= 16
    for prompt in matrix.prompts:
        assert loadable(len(prompt)) >= 0.75 * len(prompt)


def test_own_state_is_read_in_full(matrix: Matrix) -> None:
    """The positive control of everything below: the identical rerun hits, bound as unbound."""
    assert matrix["seed", "bound"].loaded == matrix["seed", "unbound"].loaded == 0
    assert matrix["own", "unbound"].loaded == matrix.loadable > 0
    assert matrix["own", "bound"].loaded == matrix.loadable
    assert _same(matrix["own", "bound"], matrix["reference", "first"])


CRASHES = ("kv_representation", "all")
"""Where stock finds the foreign entry and dies of it: the stored type is not the cache's."""


@pytest.mark.parametrize("name", [name for name in DIMENSIONS if name not in CRASHES])
def test_unbound_reads_foreign_state(matrix: Matrix, name: str) -> None:
    """Stock collides; for what shapes state, the answer then differs, so the bound case below is conclusive."""
    assert matrix["unbound", name].loaded == matrix.loadable
    if name != "sharing_domain":
        assert not _same(matrix["unbound", name], matrix["reference", name])


@pytest.mark.parametrize("name", CRASHES)
def test_unbound_dies_of_foreign_state(matrix: Matrix, name: str) -> None:
    with pytest.raises(EngineDiedError, match="source and destination dtypes match"):
        _ = matrix["unbound", name]


@pytest.mark.parametrize("name", [*DIMENSIONS, "all"])
def test_bound_reads_none_and_equals_the_reference(matrix: Matrix, name: str) -> None:
    assert matrix["bound", name].loaded == 0
    # Nothing was loaded, so the computation is the same one, to the bit.
    assert matrix["bound", name].answers == matrix["reference", name].answers


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_dimensions_do_not_meet(matrix: Matrix, name: str) -> None:
    assert matrix["bound", name].loaded == 0


@pytest.mark.parametrize("name", [*DIMENSIONS, "all"])
def test_each_provenance_reads_its_own_state(matrix: Matrix, name: str) -> None:
    """The store that held only the first provenance's entries now also holds these."""
    assert matrix["own", name].loaded == matrix.loadable
    assert _same(matrix["own", name], matrix["reference", name])


@pytest.mark.parametrize("withheld", DIMENSIONS)
@pytest.mark.parametrize("varied", DIMENSIONS)
def test_withholding_a_dimension_reopens_exactly_that_one(matrix: Matrix, withheld: str, varied: str) -> None:
    if withheld == varied == "kv_representation":
        with pytest.raises(EngineDiedError, match="source and destination dtypes match"):
            _ = matrix["withheld", withheld, varied]
        return
    read = matrix["withheld", withheld, varied]
    assert read.loaded == (matrix.loadable if varied == withheld else 0)
    assert f"UNSAFE: withheld={withheld}" in read.log


@pytest.mark.parametrize("name", [name for name in COMPUTATIONAL if name not in CRASHES])
def test_dimensions_change_the_answer(matrix: Matrix, name: str) -> None:
    """Else a foreign read could not be told from an own one. Where stock dies of it, nothing need be told apart."""
    assert matrix["reference", name].answers != matrix["reference", "first"].answers
