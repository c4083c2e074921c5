"""`kvprov store diff`: what is shown, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvprov.check.store import Worker
from kvprov.check.store.served import Model
from tests.check.store.stores import example, lmcache_mp, name, sglang
from tests.cli.support import error_json, error_line, run

VALUES = np.arange(8, dtype="<f4")


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        example(tmp_path / folder, 0, VALUES)
    return tmp_path / "a", tmp_path / "b"


def test_equal_stores(two: tuple[Path, Path]) -> None:
    result = run("store", "diff", *two)
    assert result.exit_code == 0
    assert "All 1 shared entries are equal." in result.stdout


def test_a_collision_ends_with_1_and_names_key_and_difference(two: tuple[Path, Path]) -> None:
    key = example(two[1], 0, VALUES * 2)
    result = run("store", "diff", *two)
    assert result.exit_code == 1
    assert f"COLLIDE {key}: largest difference 7 (bfloat16) in kv_cache" in result.stdout
    assert "1 of 1 shared entries collide" in result.stdout


def test_a_tolerance(two: tuple[Path, Path]) -> None:
    example(two[1], 0, VALUES * 2)
    result = run("store", "diff", *two, "--tolerance", "7")
    assert result.exit_code == 0
    assert "All 1 shared entries are equal within the tolerance." in result.stdout
    assert run("store", "diff", *two, "--tolerance", "6.9").exit_code == 1


def test_what_could_not_be_compared_ends_with_2_and_no_traceback(two: tuple[Path, Path]) -> None:
    key = example(two[1], 1, VALUES)
    example(two[0], 1, VALUES)
    (two[1] / key).write_bytes(b"\1\2\3")
    result = run("store", "diff", *two)
    assert result.exit_code == 2
    assert "NOT COMPARED" in result.stdout
    assert "the second store's: it has 3 bytes, too few for a safetensors header" in result.stdout


def test_json(two: tuple[Path, Path], tmp_path: Path) -> None:
    example(two[1], 0, VALUES * 2)
    result = run("store", "diff", *two, "--json", "-")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["collisions"] == report["shared"] == 1
    assert report["colliding"][0]["largest_difference"] == 7
    run("store", "diff", *two, "--json", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_names_of_files_reach_no_terminal_as_they_are(two: tuple[Path, Path]) -> None:
    hostile = f"\x1b[2Jx@0x01000100@0@{'0' * 64}@<b>\u202e.data"
    for root, data in zip(two, (b"aa", b"bb"), strict=True):
        (root / hostile).write_bytes(data)
    shown = run("store", "diff", *two).stdout
    assert "COLLIDE" in shown
    assert all(char == "\n" or char.isprintable() for char in shown)
    as_json = run("store", "diff", *two, "--json", "-").stdout
    assert "<" not in as_json
    assert json.loads(as_json)["colliding"][0]["key"] == hostile


def test_one_format_and_a_type(two: tuple[Path, Path]) -> None:
    for root, factor in zip(two, (1, 3), strict=True):
        lmcache_mp(root, 0, VALUES * factor)
        sglang(root, 0, VALUES)
    assert json.loads(run("store", "diff", *two, "--format", "sglang-file", "--json", "-").stdout)["shared"] == 1
    result = run("store", "diff", *two, "--format", "lmcache-mp", "--dtype", "bf16")
    assert "largest difference 14 (bfloat16)" in result.stdout


def test_many_collisions_are_shown_in_part(two: tuple[Path, Path]) -> None:
    for number in range(50):
        for root, data in zip(two, (b"aa", b"bb"), strict=True):
            (root / f"{name(number)}_m_0_1.bin").write_bytes(data)
    result = run("store", "diff", *two)
    assert result.stdout.count("COLLIDE") == 20
    assert "... and 30 more: see --json" in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["/no/such", "/no/such"], "cannot be read: No such file"),
        (["--format", "tape"], "is no format"),
        (["--dtype", "x"], "no element type"),
        (["--tolerance", "-1"], "Give a number that is not negative"),
    ],
)
def test_errors(two: tuple[Path, Path], args: list[str], says: str) -> None:
    result = run("store", "diff", *(args if args[0].startswith("/") else [*two, *args]))
    assert result.exit_code == 2
    assert says in error_line(result)


def test_errors_as_json(tmp_path: Path) -> None:
    result = run("store", "diff", tmp_path, tmp_path, "--json", "-")
    assert result.exit_code == 2
    assert error_json(result)["code"] == "store"
    assert "known format" in error_json(result)["message"]


# `kvprov store check`: its workers are made up here; real ones run in tests/engines/test_stores_and_ledger.py and
# tests/engines/sglang/test_store_check.py.


class _Fleet:
    def __init__(self, separates: bool) -> None:
        self.title, self.dimensions, self._separates = "made up", ("adapter", "precision"), separates

    def write(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            bound = worker.binding not in ("unbound", worker.differs) and self._separates
            example(worker.store, len(worker.differs or "") if bound else 0, VALUES + (worker.differs is not None))


def _fleet(monkeypatch: pytest.MonkeyPatch, *, separates: bool) -> None:
    monkeypatch.setattr("kvprov.check.store.vllm.VllmFleet", lambda *_: _Fleet(separates))


def test_a_sound_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fleet(monkeypatch, separates=True)
    result = run("store", "check", "--engine", "vllm", "--keep", tmp_path / "kept", "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert "The complete binding separates every pair" in result.stdout
    assert "without adapter" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["sound"]
    assert (tmp_path / "kept" / "stores" / "unbound" / "first").is_dir()


def test_a_check_that_finds_something_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    _fleet(monkeypatch, separates=False)
    result = run("store", "check", "--engine", "vllm", "--dimension", "adapter")
    assert result.exit_code == 1
    assert "collides: WRONG" in result.stdout
    assert "Not as it should be: adapter (complete)." in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--connector", "tape"], "none of example, vllm-fs"),
        (["--adapter", "a"], "Give --adapter twice"),
        (["--adapter", "a", "--adapter", "b"], "give --model"),
        (["--dimension", "weights"], "cannot be made to differ in 'weights'"),
        (["--model", "/no/such"], "it does not exist"),
        (["--weights", "w"], "Only workers of SGLang's"),
        (["--engine-arg", "x"], "is not NAME=VALUE"),
        (["--engine", "sglang", "--connector", "example", "--model", "/no/such"], "'example' is none of file"),
        (["--engine", "sglang", "--weights", "w"], "give --model"),
    ],
)
def test_a_check_that_cannot_be_made(args: list[str], says: str) -> None:
    result = run("store", "check", "--engine", "vllm", *args)
    assert result.exit_code == 2
    assert says in error_line(result)


def test_the_engine_is_the_one_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Model] = []

    def fleet(model: Model, work: Path) -> _Fleet:
        assert work.is_dir()
        seen.append(model)
        return _Fleet(separates=True)

    monkeypatch.setattr("kvprov.check.store.sglang.SglangFleet", fleet)
    monkeypatch.setattr("kvprov.check.store.fleets.installed", lambda engine: engine == "sglang")
    told = ["--engine-arg", "page-size=32", "--engine-arg", "device=cpu", "--engine-arg", 'x={"a": [1]}']
    served = ["--model", tmp_path / "m", "--adapter", "a", "--adapter", "b", "--weights", "w"]
    result = run("store", "check", *told, *served)
    assert result.exit_code == 0, result.output
    arguments = {"page_size": 32, "device": "cpu", "x": {"a": [1]}}
    assert seen == [Model(tmp_path / "m", (Path("a"), Path("b")), Path("w"), arguments)]


@pytest.mark.parametrize(("both", "says"), [(True, "are both installed"), (False, "none is installed")])
def test_no_engine_is_guessed(monkeypatch: pytest.MonkeyPatch, both: bool, says: str) -> None:
    monkeypatch.setattr("kvprov.check.store.fleets.installed", lambda _engine: both)
    result = run("store", "check")
    assert result.exit_code == 2
    assert says in error_line(result)
