"""`kvprov store check` with workers of SGLang's, and their stores read once more, byte by byte."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvprov.check.store import Worker, diff_stores
from kvprov.check.store import sglang as fleets
from kvprov.check.store.check import COMPLETE, FIRST, UNBOUND, Outcome
from kvprov.check.store.fleets import SGLANG, bundled
from kvprov.check.store.served import DOCUMENT_TOKENS, DOCUMENTS
from kvprov.check.store.sglang_worker import PAGE_TOKENS
from tests.cli.support import run as command
from tests.support.processes import PARALLEL, EngineDiedError
from tests.support.sglang.models import LongModels
from tests.support.sglang.plugins import install_plugins
from tests.support.sglang.processes import Processes
from tests.support.sglang.stores import CPU_ARGUMENTS, WorkerLaunch

pytestmark = pytest.mark.engine

DIMENSIONS = ("adapter", "weights")
PAGES = DOCUMENTS * (DOCUMENT_TOKENS // PAGE_TOKENS)


@dataclass
class Checked:
    """What the command came to.

    Attributes:
        result: How it ended.
        report: What it reported.
        stores: A store for each binding and worker.
        requests: What each worker was asked, by its name.
        started: The store of a worker of the complete binding that was started as a user would start it.
        log: What that one logged.
    """

    result: Result
    report: dict[str, Any]
    stores: Path
    requests: dict[str, dict[str, Any]]
    started: Path
    log: str

    def store(self, binding: str, worker: str) -> Path:
        return self.stores / binding / worker


def _write(
    processes: Processes, requests: dict[str, dict[str, Any]], worker: Worker, asked: Any, settings: Any
) -> None:
    requests[worker.name] = asked
    processes.run(WorkerLaunch(asked["model"], env=dict(settings), asked=asked))


@pytest.fixture(scope="module")
def checked(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    root = tmp_path_factory.mktemp("store-check")
    requests: dict[str, dict[str, Any]] = {}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as beside:
        own = root / "started"
        (own / "work").mkdir(parents=True)
        worker = Worker(COMPLETE, None, own / "store")
        worker.store.mkdir()
        fleet = fleets.SglangFleet(bundled(SGLANG, CPU_ARGUMENTS, own / "work"), own / "work")
        path = [install_plugins(own / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        # Would keep kvprov out, if it reached the worker.
        patch.setenv("SGLANG_PLUGINS", "cpu")
        started = beside.submit(fleet.write, [worker])
        # All others are forked from a server that has imported SGLang, which is what takes long.
        run = partial(_write, processes, requests)
        quick = partial(fleets.SglangFleet, run=run, parallel=PARALLEL)
        patch.setattr(fleets, "SglangFleet", quick)
        told = [f"--engine-arg={name}={json.dumps(value)}" for name, value in CPU_ARGUMENTS.items()]
        asked = [f"--dimension={name}" for name in DIMENSIONS]
        result = command("store", "check", *told, *asked, "--keep", root / "kept", "--json", root / "report.json")
        started.result()
    report = json.loads((root / "report.json").read_text())
    log = (own / "work" / f"{worker.name}.log").read_text()
    return Checked(result, report, root / "kept" / "stores", requests, worker.store, log)


def pages(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.iterdir()}


def test_workers_of_one_provenance_write_the_same(checked: Checked) -> None:
    assert checked.result.exit_code == 0, checked.result.output
    assert checked.report["sound"]
    control = checked.report["control"]
    assert control["shared"] == control["equal"] == control["formats"]["sglang-file"] // 2 == PAGES
    assert control["only_first"] == control["only_second"] == control["other_files"] == control["odd_files"] == 0


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_unbound_every_shared_page_whose_bytes_differ_collides(checked: Checked, dimension: str) -> None:
    first, second = checked.store(UNBOUND, FIRST), checked.store(UNBOUND, dimension)
    found, ours, theirs = diff_stores(first, second, dtype="bfloat16"), pages(first), pages(second)
    both = ours.keys() & theirs.keys()
    differing = {name for name in both if ours[name] != theirs[name]}
    assert len(both) == found.shared == PAGES
    assert {item.key for item in found.collisions} == differing
    assert found.equal == len(both) - len(differing)
    assert len(differing) > PAGES / 2
    assert all(item.outcome.largest and item.outcome.largest > 0 for item in found.collisions)
    [row] = [r for r in checked.report["rows"] if (r["binding"], r["dimension"]) == (UNBOUND, dimension)]
    assert row["collisions"] == len(differing)


def test_each_binding_does_what_it_should_to_each_dimension(checked: Checked) -> None:
    outcomes = {(row["binding"], row["dimension"]): row["outcome"] for row in checked.report["rows"]}
    expected = {(UNBOUND, d): Outcome.COLLIDES for d in DIMENSIONS}
    expected |= {(COMPLETE, d): Outcome.SEPARATED for d in DIMENSIONS}
    expected |= {(w, d): Outcome.COLLIDES if w == d else Outcome.SEPARATED for w in DIMENSIONS for d in DIMENSIONS}
    assert outcomes == expected


def test_by_names_and_bytes_of_files_it_is_the_same(checked: Checked) -> None:
    for binding in (COMPLETE, *DIMENSIONS):
        ours = pages(checked.store(binding, FIRST))
        for dimension in DIMENSIONS:
            theirs = pages(checked.store(binding, dimension))
            # They wrote all of it, so that there was something to collide.
            assert len(ours) == len(theirs) == PAGES
            shared = ours.keys() & theirs.keys()
            assert len(shared) == (PAGES if binding == dimension else 0)
            assert sum(ours[name] != theirs[name] for name in shared) > PAGES / 2 or binding != dimension


def test_workers_differ_in_bytes_at_one_path(checked: Checked) -> None:
    """So that it is content that separates them, and nothing that they were told."""
    for binding in (UNBOUND, COMPLETE):
        first = checked.requests[f"{binding}-{FIRST}"]
        for dimension in DIMENSIONS:
            other = checked.requests[f"{binding}-{dimension}"]
            assert {name for name in first if first[name] != other[name]} == {"store"}


def test_a_worker_started_as_a_user_would_writes_the_same(checked: Checked) -> None:
    """In another folder, and in processes that nobody prepared."""
    assert pages(checked.started) == pages(checked.store(COMPLETE, FIRST))
    [line] = [line for line in checked.log.splitlines() if "kvprov: mode=enforce" in line]
    assert "path=hicache:" in line
    assert "UNSAFE" not in line


def test_a_bound_worker_without_binding_does_not_run(processes: Processes, models: LongModels, tmp_path: Path) -> None:
    without = {"KVPROV_MODE": "enforce", "SGLANG_PLUGINS": "cpu"}
    runs: list[str] = []

    def run(worker: Worker, asked: dict[str, Any], _settings: object) -> None:
        runs.append(worker.name)
        _write(processes, {}, worker, asked, without)

    (tmp_path / "work").mkdir()
    # Not even when the engine is told otherwise.
    arguments = {**CPU_ARGUMENTS, "hicache_storage_backend": "file"}
    fleet = fleets.SglangFleet(fleets.Model(Path(models.base), arguments=arguments), tmp_path / "work", run)
    worker = Worker(COMPLETE, None, tmp_path / "store")
    worker.store.mkdir()
    with pytest.raises(EngineDiedError) as raised:
        fleet.write([worker])
    assert "is not in effect in this process" in raised.value.log
    assert runs == ["complete-store"]
    assert not list(worker.store.iterdir())
