"""Stores that real workers wrote, compared; and the ledgers that they kept, explained."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvprov.check.store import StoreCheck, Worker, check_stores, diff_stores
from kvprov.check.store import vllm as fleets
from kvprov.check.store.check import COMPLETE, UNBOUND, Outcome
from tests.cli.support import run as command
from tests.support.host_offload import offloading
from tests.support.models import Models
from tests.support.processes import PARALLEL, Processes
from tests.support.stores import WorkerLaunch
from tests.support.tiers.offloading import file_tier

pytestmark = pytest.mark.engine

CONNECTORS: dict[str, fleets.Connector] = {
    "example": fleets.example,
    "fs": lambda store: {"kv_role": "kv_both", **offloading(file_tier(store))},
}
DIMENSIONS = {"example": ("adapter", "model_config"), "fs": ("adapter", "precision")}
SECOND_ROPE = 123456
EXPLANATIONS = {
    "adapter": "two adapters of different content",
    "precision": "fp8_per_channel",
    "model_config": f"config.rope_parameters.rope_theta is 10000 in the first and {SECOND_ROPE} in the second",
}


@dataclass
class Written:
    """What the workers of one tier wrote.

    Attributes:
        folder: A store for each binding and worker.
        dimensions: In which of them another worker differs from the first.
        found: What comparing the stores came to.
        ledger: What all bound workers recorded.
        texts: The digest that each worker of the complete binding recorded.
        logs: What each of these wrote to its log.
    """

    folder: Path
    dimensions: Sequence[str]
    found: StoreCheck
    ledger: Path
    texts: dict[str, str]
    logs: dict[str, str]

    def store(self, binding: str, worker: str) -> Path:
        return self.folder / binding / worker

    def worker_text(self, worker: str) -> str:
        """The worker digest, from the start-up line in a bound worker's log."""
        match = re.search(r"kvprov: mode=enforce .*?worker=([A-Za-z0-9_-]{43})", self.logs[worker])
        assert match is not None
        return match[1]


@pytest.fixture(scope="module", params=sorted(CONNECTORS))
def written(
    request: pytest.FixtureRequest, processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Written:
    root = tmp_path_factory.mktemp(request.param)
    ledgers, logs = root / "ledgers", {}

    def run(worker: Worker, asked: dict[str, Any], settings: Mapping[str, str]) -> None:
        env = {
            **settings,
            **({"KVPROV_LEDGER": str(ledgers / worker.store.name)} if worker.binding == COMPLETE else {}),
        }
        ended = processes.run(WorkerLaunch(models.base, env=env, asked=asked))
        if worker.binding == COMPLETE:
            logs[worker.store.name] = ended.log

    served = fleets.Model(
        Path(models.base), (Path(models.adapter("standard").path), Path(models.adapter("inverted").path))
    )
    (root / "work").mkdir()
    fleet = fleets.VllmFleet(served, CONNECTORS[request.param], request.param, root / "work", run, PARALLEL)
    dimensions = DIMENSIONS[request.param]
    found = check_stores(fleet, root / "stores", dimensions=dimensions)
    texts = {}
    for ledger in sorted(ledgers.iterdir()):
        # One digest each, and none of the self-check's.
        (record,) = (ledger / "digests").iterdir()
        shutil.copytree(ledger, root / "ledger", dirs_exist_ok=True)
        texts[ledger.name] = record.stem
    return Written(root / "stores", dimensions, found, root / "ledger", texts, logs)


def differing(first: Path, second: Path) -> dict[str, bool]:
    """Which files both folders have, and whether their bytes differ: by reading all of them."""
    both = {
        str(file.relative_to(first)): second / file.relative_to(first)
        for file in first.rglob("*")
        if file.is_file() and file.name != "config.json"
    }
    return {key: (first / key).read_bytes() != other.read_bytes() for key, other in both.items() if other.exists()}


def test_workers_of_one_provenance_write_the_same(written: Written) -> None:
    control = written.found.control
    assert written.found.judged
    assert control.shared == control.equal > 0
    assert control.only_first == control.only_second == control.odd == 0


def test_unbound_every_shared_page_whose_bytes_differ_collides(written: Written) -> None:
    for dimension in written.dimensions:
        first, second = written.store(UNBOUND, "first"), written.store(UNBOUND, dimension)
        found = diff_stores(first, second)
        oracle = differing(first, second)
        assert len(oracle) == found.shared
        assert {item.key for item in found.collisions} == {key for key, differs in oracle.items() if differs}
        assert found.equal == sum(not differs for differs in oracle.values())
        assert len(found.collisions) > 0.5 * found.shared > 0
        for item in found.collisions:
            assert item.outcome.dtype == "bfloat16"
            assert item.outcome.largest is not None
            assert item.outcome.largest > 0
        largest = max(item.outcome.largest or 0 for item in found.collisions)
        forgiven = diff_stores(first, second, tolerance=largest)
        assert forgiven.within == len(found.collisions)
        assert not forgiven.collisions


def test_each_binding_does_what_it_should_to_each_dimension(written: Written) -> None:
    outcomes = {(row.binding, row.dimension): row.outcome for row in written.found.rows}
    expected = {(UNBOUND, d): Outcome.COLLIDES for d in written.dimensions}
    expected |= {(COMPLETE, d): Outcome.SEPARATED for d in written.dimensions}
    expected |= {
        (withheld, d): Outcome.COLLIDES if withheld == d else Outcome.SEPARATED
        for withheld in written.dimensions
        for d in written.dimensions
    }
    assert outcomes == expected
    assert written.found.sound, written.found.words
    for row in written.found.rows:
        if row.binding != row.dimension and row.binding != UNBOUND:
            # They wrote something, so that there was something to collide.
            assert row.diff.only_first == row.diff.only_second > 0


def test_the_command_says_the_same(written: Written, tmp_path: Path) -> None:
    first, second = (str(written.store(UNBOUND, worker)) for worker in ("first", "adapter"))
    result = command("store", "diff", first, second, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert result.exit_code == 1
    assert "COLLIDE" in result.stdout
    assert report["collisions"] == len(diff_stores(first, second).collisions)
    bound = [str(written.store(COMPLETE, worker)) for worker in ("first", "adapter")]
    result = command("store", "diff", *bound, "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["collisions"] == 0


# The ledger.


def explained(written: Written, *keys: str) -> dict[str, Any]:
    result = command("explain", *keys, "--ledger", str(written.ledger), "--json", "-")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    assert loaded["forged"] == []
    return loaded


def separations(report: Mapping[str, Any]) -> dict[str, str]:
    return {item["dimension"]: item["words"] for item in report["comparison"]["separations"]}


def test_a_real_engine_s_digests_are_explained(written: Written) -> None:
    first = written.texts["first"]
    report = explained(written, first)
    (key,) = report["keys"]
    assert [(d["dimension"], d["identity"] is None) for d in key["dimensions"]] == [
        ("kv_representation", False),
        ("model_config", False),
        ("precision", False),
        ("weights", False),
        ("adapter", False),
        ("client_namespace", True),
        ("sharing_domain", False),
    ]
    assert key["digest"][:21] == first[:21]
    assert key["said_by_the_writer"]["names"] == {"adapter": "adapter"}
    assert key["said_by_the_writer"]["facts"]["engine"].startswith("vLLM ")
    for dimension in written.dimensions:
        apart = separations(explained(written, first, written.texts[dimension]))
        assert list(apart) == [dimension]
        assert EXPLANATIONS[dimension] in apart[dimension]


def test_worker_digests_of_start_up_lines_are_explained(written: Written) -> None:
    (other,) = {"model_config", "precision"} & set(written.dimensions)
    report = explained(written, written.worker_text("first"), written.worker_text(other))
    assert [key["state"] for key in report["keys"]] == ["worker", "worker"]
    assert list(separations(report)) == [other]
    same = explained(written, written.worker_text("first"), written.texts["adapter"])
    assert same["comparison"]["same"]


def test_the_ledger_holds_no_salt_and_nothing_of_the_self_check(written: Written) -> None:
    files = [file for file in written.ledger.rglob("*") if file.is_file()]
    contents = [file.read_bytes() for file in files]
    assert any(b'"sharing_domain"' in content for content in contents)
    # The documents' salt is the word "first"; digests are base64url or hex.
    assert not any(re.search(rb"nonce:|salt|\bfirst\b", content) for content in contents)
    assert len(list((written.ledger / "digests").iterdir())) == 1 + len(written.dimensions)
