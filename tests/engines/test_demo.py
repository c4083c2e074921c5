"""The demo on the real engine: one run, and what must hold of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvprov.demo

PHASES = ["reference", "own_unbound", "cross_unbound", "cross_bound", "own_bound", "renamed_bound"]


@pytest.mark.engine
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    code = kvprov.demo.run(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [phase["name"] for phase in results["phases"]] == PHASES
    phases = {phase["name"]: phase for phase in results["phases"]}
    reference, cross, bound = phases["reference"], phases["cross_unbound"], phases["cross_bound"]
    own = phases["own_unbound"]
    read = {process["name"]: process["tokens_read_by_writer"] for process in results["processes"]}

    assert results["reviews"] == 200
    assert results["versions"]["vllm"]
    assert reference["agreement"] == 1.0
    assert reference["tokens_loaded"] == 0
    # Without kvprov, the reader is served foreign state, and that harms it.
    assert read["cross_unbound"] == {"A": cross["tokens_loaded"]}
    assert cross["tokens_loaded"] >= 0.7 * cross["prompt_tokens"]
    assert cross["accuracy"] <= reference["accuracy"] - 0.20
    # With kvprov, it is served none, and answers as if it were alone.
    assert read["cross_bound"] == {}
    assert bound["tokens_loaded"] == 0
    assert bound["agreement"] == 1.0
    # Its own state it is still served, all that can be, also when its adapter has another folder, name and id.
    assert own["tokens_loaded"] == own["tokens_loadable"] > 0
    for name in ("own_bound", "renamed_bound"):
        assert phases[name]["tokens_loaded"] == own["tokens_loaded"]
        assert read[name] == {"B": own["tokens_loaded"]}

    assert all(claim["holds"] for claim in results["claims"])
    assert code == 0
    assert (tmp_path / "report.html").stat().st_size < 100_000
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {p["name"] for p in results["processes"]}
