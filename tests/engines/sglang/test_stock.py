"""What SGLang does by itself: the controls before anything is said of kvprov.

What SGLang keeps apart, and reads again, is the paper's for 0.5.20 too.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.packages import install
from tests.support.processes import EngineDiedError, Run
from tests.support.sglang.engine import PAGE, RELEASE, Answer, Engine, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.plugins import GROUP
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import flush, generate, stored
from tests.support.steps import same

pytestmark = pytest.mark.engine


def local(answers: list[Answer]) -> int:
    """Return how many tokens were still on the device or in the host's memory."""
    return sum(answer.device + answer.host for answer in answers)


WITNESS = """
import os

def register():
    with open(os.environ["TEST_WITNESS"], "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
"""
"""A plugin that says in which processes it was loaded."""


def die(_engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def session(leader: int) -> list[str]:
    """Return the processes of the session of `leader` that still run.

    A dead one may stay listed until its parent asks how it ended.
    """
    found = []
    for process in psutil.process_iter(["status", "name"]):
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.info["name"])
    return found


def test_each_process_loads_the_plugins_and_none_outlives_its_engine(
    processes: Processes, models: LongModels, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    package = install(tmp_path / "package", "witness", WITNESS, {"witness": "register"}, group=GROUP)
    launch = Launch(models.base, env={"TEST_WITNESS": str(witness)}, path=(package,))
    with pytest.raises(EngineDiedError, match="ended with -9"):
        processes.run(launch, die)
    engine, *others = [tuple(map(int, line.split())) for line in witness.read_text().splitlines()]
    # The scheduler, and on 0.5.23 the detokenizer: new processes of the engine that load them anew.
    assert len({pid for pid, _ in others} - {engine[0]}) == {"0.5.20": 1, "0.5.23": 2}[RELEASE]
    assert {parent for _, parent in others} == {engine[0]}
    deadline = time.monotonic() + 10
    while session(engine[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session(engine[0]) == []


def test_prompts_reach_the_scale_of_the_paper(prompts: list[list[int]]) -> None:
    assert all(loadable(len(prompt), page) >= 2048 for prompt in prompts for page in (1, PAGE, 64))


@pytest.mark.parametrize("page", [1, PAGE])
def test_a_second_process_reads_all_that_the_first_wrote(
    processes: Processes, models: LongModels, store: Path, prompts: list[list[int]], page: int
) -> None:
    launch = Launch(models.base, store, mode=None, args={"page_size": page})
    ask = partial(generate, prompts=prompts)
    full = sum(loadable(len(prompt), page) for prompt in prompts)

    cold, hot, _, flushed = processes.run(launch, ask, ask, flush, ask).results
    assert [stored(cold), local(cold)] == [0, 0]
    assert [stored(hot), local(hot)] == [0, full]
    assert [stored(flushed), local(flushed)] == [full, 0]

    [warm] = processes.run(launch, ask).results
    assert [stored(warm), local(warm)] == [full, 0]
    assert same(hot, cold)
    assert same(flushed, cold)
    assert same(warm, cold)


def test_salts_adapters_stores_and_served_names_are_separate(
    processes: Processes, models: LongModels, store: Path, tmp_path: Path, prompts: list[list[int]], full: int
) -> None:
    adapters = {policy: models.adapter(policy).path for policy in ("standard", "inverted")}
    launch = Launch(models.base, store, mode="off", adapters=adapters)
    ask = partial(generate, prompts=prompts)
    standard, inverted = partial(ask, adapter="standard"), partial(ask, adapter="inverted")

    first = processes.run(launch, ask, partial(ask, salt="X"), partial(ask, extra_key="E"), standard, inverted)
    assert [stored(answers) + local(answers) for answers in first.results] == [0, 0, 0, 0, 0]
    base, salted, keyed, as_standard, as_inverted = first.results
    # They can be told apart, so that a foreign read is seen.
    assert not same(as_standard, base)
    assert not same(as_inverted, base)
    assert not same(as_inverted, as_standard)

    second = processes.run(
        launch, ask, partial(ask, salt="X"), partial(ask, extra_key="E"), standard, inverted,
        partial(ask, salt="Y"), partial(ask, extra_key="F"),
    )  # fmt: skip
    assert [stored(answers) for answers in second.results] == [full, full, full, full, full, 0, 0]
    for warm, cold in zip(second.results, [base, salted, keyed, as_standard, as_inverted, base, base], strict=True):
        assert same(warm, cold)

    clean = tmp_path / "clean"
    clean.mkdir()
    renamed = dataclasses.replace(launch, args={"served_model_name": "other"})
    for run in processes.run_all([(dataclasses.replace(launch, store=clean), [ask]), (renamed, [ask])]):
        assert isinstance(run, Run), run
        [alone] = run.results
        assert stored(alone) == 0
        assert same(alone, base)


def test_an_adapter_replaced_in_place_reads_the_state_of_the_one_before(
    processes: Processes, models: LongModels, store: Path, tmp_path: Path, prompts: list[list[int]], full: int
) -> None:
    folder = tmp_path / "adapter"
    models.adapter("standard", folder=folder)
    launch = Launch(models.base, store, mode="off", adapters={"policy": str(folder)})
    ask = partial(generate, prompts=prompts, adapter="policy")
    before, _, own = processes.run(launch, ask, flush, ask).results
    assert stored(before) == 0
    assert stored(own) == full

    shutil.rmtree(folder)
    models.adapter("inverted", folder=folder)
    alone = tmp_path / "alone"
    alone.mkdir()
    [reference] = processes.run(dataclasses.replace(launch, store=alone), ask).results
    assert stored(reference) == 0

    [after] = processes.run(launch, ask).results
    assert stored(after) == full, "the state is foreign: another adapter computed it"
    assert not same(after, reference)
