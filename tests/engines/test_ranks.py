"""Tensor parallel size 2: which engines share, when each rank holds a part of the state."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, Launch
from tests.support.host_offload import offloading
from tests.support.models import BLOCK, Models
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.steps import generate, loaded, same, tokens
from tests.support.tiers.offloading import file_tier, files

pytestmark = pytest.mark.engine

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def fork() -> None:
    """Let workers start with vLLM in memory, as engines do here. vLLM starts them from nothing on a CPU."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def settle(_engine: Engine) -> None:
    time.sleep(1)


def exchange(engine: Engine, *, path: str) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


def digest(run: Run) -> str:
    found = re.findall(r"kvprov: mode=enforce .* worker=(\S+) ", run.log)
    assert len(found) == 1
    return str(found[0])


@dataclass
class Engines:
    """All runs.

    Attributes:
        root: The folder that the bound engines share.
        written: The names of the two ranks' entries.
        runs: By what they were.
    """

    root: Path
    written: list[str]
    runs: dict[str, Run]

    def answers(self, name: str, step: int = 0) -> list[Answer]:
        answers: list[Answer] = self.runs[name].results[step]
        return answers


@pytest.fixture(scope="module")
def engines(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    folder = tmp_path_factory.mktemp("ranks")
    root, stock, disguised = (folder / name for name in ("bound", "stock", "disguised"))
    other = models.copy_base(folder / "other")
    models.perturb(Path(other))
    ask = partial(generate, prompts=prompts, tokens=8)
    again: list[Step] = [settle, ask]

    def launch(where: Path | None, mode: str, ranks: dict[str, Any] | None = None) -> Launch:
        connector = {} if where is None else offloading(file_tier(where))
        before = fork if ranks else None
        return Launch(
            models.base, where, mode, args={"enable_lora": False, **(ranks or {})}, connector=connector, before=before
        )

    runs: dict[str, Run] = {}
    runs["isolated"] = processes.run(launch(None, "off"), ask)
    # One at a time: two ranks keep both cores of a small machine busy.
    runs["two"] = processes.run(launch(root, "enforce", TWO_RANKS), ask, settle)
    written = files(root)
    runs["two again"] = processes.run(launch(root, "enforce", TWO_RANKS), ask, partial(exchange, path=other), ask)
    runs["one"] = processes.run(launch(root, "enforce"), ask, *again)
    # What two ranks wrote, under the name that an engine of one goes by.
    one = next(name.split("/")[0] for name in files(root) if name.startswith("kvprov-tp1-"))
    shutil.copytree(root / written[0].split("/")[0], disguised / one)
    runs["disguised"] = processes.run(launch(disguised, "enforce"), ask)
    runs["two, stock"] = processes.run(launch(stock, "off", TWO_RANKS), ask, settle)
    runs["one, stock"] = processes.run(launch(stock, "off"), ask)
    return Engines(root, written, runs)


def test_the_same_ranks_share(engines: Engines, full: int) -> None:
    assert loaded(engines.answers("two")) == 0
    assert loaded(engines.answers("two again")) == full > 0
    assert tokens(engines.answers("two")) == tokens(engines.answers("two again"))
    assert tokens(engines.answers("two")) == tokens(engines.answers("isolated"))


def test_other_weights_on_the_same_ranks_do_not(engines: Engines) -> None:
    assert loaded(engines.answers("two again", 2)) == 0
    assert not same(engines.answers("two again", 2), engines.answers("two"))


def test_an_engine_of_one_rank_does_not_read_what_two_wrote(engines: Engines, full: int) -> None:
    one = engines.runs["one"]
    # Everything else is the same: the digest does not hold the shape, which is a fact of this connector's entries.
    assert digest(one) == digest(engines.runs["two"])
    assert loaded(engines.answers("one")) == 0
    assert tokens(engines.answers("one")) == tokens(engines.answers("isolated"))
    assert loaded(engines.answers("one", 2)) == full


def test_stock_mixes_up_the_layers_of_two_ranks(engines: Engines, full: int) -> None:
    """The control: it takes entries for readable by any number of ranks."""
    assert loaded(engines.answers("one, stock")) == full
    assert tokens(engines.answers("one, stock")) != tokens(engines.answers("isolated"))


def test_it_is_the_name_that_keeps_them_apart(engines: Engines, full: int) -> None:
    """The same bytes under the other shape's name are read, and are wrong."""
    assert loaded(engines.answers("disguised")) == full
    assert tokens(engines.answers("disguised")) != tokens(engines.answers("isolated"))


def test_an_entry_holds_both_ranks(engines: Engines, full: int) -> None:
    """vLLM's tier of files is written by the scheduler: one file for all ranks, each with a part of its own."""
    assert len(engines.written) * BLOCK == full
    assert all(name.startswith("kvprov-tp2-pp1-pcp1-dcp1_") for name in engines.written)
    content = (engines.root / engines.written[0]).read_bytes()
    half = len(content) // 2
    assert content[:half] != content[half:]
    assert any(content[half:])
    folder = engines.written[0].split("/")[0].removesuffix("_r0")
    assert json.loads((engines.root / folder / "config.json").read_text())["model_name"].startswith("kvprov-tp2")
