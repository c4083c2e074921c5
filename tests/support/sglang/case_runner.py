"""Runs cases in real engines: stock, bound, and with dimensions withheld.

Every case has a prompt of its own, so one store serves all cases of a binding. Writer and reader are processes of their
own, and the reader's provenance is one that nobody has written before: whatever its first request loads is foreign.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.processes import EngineDiedError, Run
from tests.support.sglang.cases import BEST_EFFORT, FIRST, OWN, PROBES, TENANT, WAIT, Case, Worker
from tests.support.sglang.engine import Answer, Engine, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import written

BOUND_S = 10.0
"""Seconds after which a request counts as one that is never answered. They take less than one."""
TOKENS = 8
_SILENT = "kvprov_silent"
"""Attribute of an engine that has left a request without an answer."""


@dataclass(frozen=True)
class Attempt:
    """What one request gave.

    Attributes:
        answer: The answer, or None where there was none.
        seconds: How long it took.
    """

    answer: Answer | None
    seconds: float

    @property
    def stored(self) -> int:
        """Tokens read from the store."""
        assert self.answer is not None, f"no answer in {self.seconds:.0f} s"
        return self.answer.storage


def attempt(engine: Engine, *, prompt: list[int], queued: bool, tokens: int = TOKENS, **request: Any) -> Attempt:
    """Complete `prompt`.

    Args:
        engine: The engine.
        prompt: The prompt.
        queued: Whether to let it wait behind another request. An idle engine begins with a request at once, and a
            policy that does not wait then leaves the store no time.
        tokens: How many tokens to generate.
        request: More of the request.
    """
    # Too short to be stored.
    prompts = [prompt[:12], prompt] if queued else [prompt]
    begun = time.monotonic()
    bound = BOUND_S if not vars(engine).get(_SILENT) else BOUND_S / 4
    try:
        answers = engine.generate(prompts, tokens=40 if queued else tokens, timeout=bound, **request)
    except TimeoutError:
        vars(engine)[_SILENT] = True
        return Attempt(None, time.monotonic() - begun)
    seconds = time.monotonic() - begun
    answer = answers[-1]
    short = dataclasses.replace(answer, tokens=answer.tokens[:tokens], logprobs=answer.logprobs[:tokens])
    return Attempt(short, seconds)


def forget(engine: Engine) -> None:
    """Let the engine forget what it holds itself, if it still answers."""
    if vars(engine).get(_SILENT):
        return
    engine.wait_until_written()
    deadline = time.monotonic() + 5
    while not engine.engine.flush_cache().success and time.monotonic() < deadline:
        time.sleep(0.02)


@dataclass
class Measured:
    """All attempts of some cases.

    Attributes:
        cases: The cases.
        loadable: How many tokens of each case's prompt the store can give.
        references: What an engine like the reader answers that has no store.
        foreign: By binding and case, the reader's first request.
        again: By binding and case, its second one, after it has forgotten what it holds; for the bound reader, in a
            second process.
        control: By binding and policy, whoever wrote first reads its own state in another process.
        rollback: What is read after the folders hold again what the first writer read.
        probes: By what is withheld, requests of cases that must stay closed.
        logs: By binding and case, the log of the reader.
    """

    cases: Sequence[Case]
    loadable: dict[Case, int] = field(default_factory=dict)
    references: dict[Case, Answer] = field(default_factory=dict)
    foreign: dict[tuple[str, Case], Attempt] = field(default_factory=dict)
    again: dict[tuple[str, Case], Attempt] = field(default_factory=dict)
    control: dict[tuple[str, str], Attempt] = field(default_factory=dict)
    rollback: dict[Case, Attempt] = field(default_factory=dict)
    probes: dict[tuple[tuple[str, ...], Case], Attempt] = field(default_factory=dict)
    logs: dict[tuple[str, Case], str] = field(default_factory=dict)


_Take = Callable[[Attempt, str], None]
"""Keeps what came of a request, and the log of the engine that answered."""
_Ask = tuple[Callable[[Engine], Any], _Take | None]


class _Phase:
    """Engines that run side by side, each with requests of which somebody keeps the attempts."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._runs: list[tuple[Launch, list[Callable[[Engine], Any]], list[_Take]]] = []

    def add(self, launch: Launch, asks: Iterable[_Ask]) -> None:
        steps, takes = [], []
        for step, take in asks:
            steps.append(step)
            takes.append(take or (lambda _attempt, _log: None))
        self._runs.append((launch, steps, takes))

    def execute(self) -> None:
        ended = self._processes.run_all([(launch, steps) for launch, steps, _ in self._runs])
        for run, (_, _, takes) in zip(ended, self._runs, strict=True):
            if isinstance(run, EngineDiedError):
                raise run
            assert isinstance(run, Run)
            for result, take in zip(run.results, takes, strict=True):
                take(result, run.log)
        self._runs.clear()


class Folders:
    """The checkpoint and the adapter, at paths that stay while their content is exchanged."""

    def __init__(self, models: LongModels, folder: Path) -> None:
        self._models, self._folder = models, folder
        self._checkpoints = {name: Path(models.copy_base(folder / name)) for name in ("first", "second")}
        models.perturb(self._checkpoints["second"])
        self.model, self.adapter = folder / "model", folder / "adapter"
        self.hold("first", "standard")

    def hold(self, weights: str, adapter: str) -> None:
        """Put these into place."""
        for target in (self.model, self.adapter):
            shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self._checkpoints[weights], self.model)
        self._models.adapter(adapter, folder=self.adapter)


class Runner:
    """Runs cases in real engines.

    Args:
        processes: Starts the engines.
        models: Where the models come from.
        folder: Where stores, checkpoint and adapter are made.
        page: Tokens of a page.
    """

    def __init__(self, processes: Processes, models: LongModels, folder: Path, page: int) -> None:
        self._phase = _Phase(processes)
        self._folders = Folders(models, folder)
        self._folder, self._page = folder, page

    def _launch(self, worker: Worker, binding: str, cases: Iterable[Case], policy: str = WAIT) -> Launch:
        kind, _, withheld = binding.partition(":")
        store = self._folder / f"store-{binding.replace(':', '-').replace(',', '-')}"
        store.mkdir(exist_ok=True)
        args = {"page_size": self._page, "hicache_storage_prefetch_policy": policy, **worker.args}
        if policy == BEST_EFFORT:
            args["max_running_requests"] = 1
        if kind == "reference":
            del args["hicache_storage_prefetch_policy"]
        adapted = any("adapter" in case.ask for case in cases)
        return Launch(
            str(self._folders.model),
            None if kind == "reference" else store,
            None if kind == "reference" else "off" if kind == "unbound" else "enforce",
            {**worker.env, **({"KVPROV_UNSAFE_WITHHOLD": withheld} if withheld else {})},
            args,
            {TENANT: str(self._folders.adapter)} if adapted else {},
        )

    def _ask(self, case: Case, prompts: Mapping[Case, list[int]], *, writer: bool = False, queued: bool = False) -> Any:
        request = case.ask if not writer or case.written_as is None else case.written_as
        return partial(attempt, prompt=prompts[case], queued=queued, tokens=1 if writer else TOKENS, **request)

    def run(
        self,
        cases: Sequence[Case],
        prompts: Mapping[Case, list[int]],
        *,
        references: Mapping[Case, Answer] | None = None,
    ) -> Measured:
        """Run `cases`, stock and bound.

        Args:
            cases: The cases.
            prompts: A prompt for each case, for `OWN` and for `PROBES`.
            references: Answers of engines without a store, where they are known. Then each reader reads its own state
                in the process that wrote it, and that is all. Otherwise these engines run, too, another process reads
                each reader's state, and cases are run with their dimensions withheld.
        """
        measured, whole = Measured(cases), references is None
        opened = [case for case in cases if case.withheld and whole]
        for case in (OWN, *cases):
            measured.loadable[case] = loadable(len(prompts[case]), self._page)
        self._seed(cases, opened, prompts)
        for weights in ("first", "second"):
            now = [case for case in cases if case.reads.weights == weights]
            self._folders.hold(weights, "inverted")
            self._read(measured, now, prompts, second_process=whole)
            self._open(measured, [case for case in opened if case in now], prompts)
            if whole:
                self._refer(measured, now, prompts)
            self._phase.execute()
            if whole:
                self._read_again(measured, now, prompts)
        if whole:
            self._folders.hold("first", "standard")
            self._roll_back(measured, prompts)
        measured.references |= references or {}
        return measured

    def refer(self, cases: Sequence[Case], prompts: Mapping[Case, list[int]]) -> dict[Case, Answer]:
        """Return what engines like the readers answer that have no store."""
        measured = Measured(cases)
        for weights in ("first", "second"):
            self._folders.hold(weights, "inverted")
            self._refer(measured, [case for case in cases if case.reads.weights == weights], prompts)
            self._phase.execute()
        return measured.references

    def _seed(self, cases: Sequence[Case], opened: Sequence[Case], prompts: Mapping[Case, list[int]]) -> None:
        for binding in ("unbound", "bound"):
            for writer in sorted({case.writes for case in cases}, key=lambda worker: worker.name):
                own = [case for case in (OWN, *cases) if case.writes == writer]
                self._write(binding, writer, own, prompts)
        for binding, group in _by(opened, _withheld).items():
            self._write(binding, FIRST, [*group, *[probe for probe in PROBES if probe not in group]], prompts)
        self._phase.execute()

    def _write(self, binding: str, writer: Worker, cases: Sequence[Case], prompts: Mapping[Case, list[int]]) -> None:
        asks = [(self._ask(case, prompts, writer=True), _expect_nothing) for case in cases]
        self._phase.add(self._launch(writer, binding, cases), [*asks, (written, None)])

    def _read(
        self, measured: Measured, cases: Sequence[Case], prompts: Mapping[Case, list[int]], *, second_process: bool
    ) -> None:
        for binding in ("unbound", "bound"):
            for (worker, policy, _), group in _by(cases, lambda c: (c.reads, c.policy or WAIT, c.writes)).items():
                queued = policy == BEST_EFFORT
                asks: list[_Ask] = []
                if worker == FIRST:
                    # Before the others: after an attempt without an answer there may be none to anything.
                    take = partial(_keep, measured.control, (binding, policy))
                    asks.append((self._ask(OWN, prompts, queued=queued), take))
                for case in group:
                    take = partial(_keep_reader, measured, binding, case)
                    asks.append((self._ask(case, prompts, queued=queued), take))
                # What is declined is asked for again: whether it is ever stored.
                if _is_kv(group) if binding == "unbound" else not second_process:
                    asks.append((forget, None))
                    for case in group:
                        take = partial(_keep, measured.again, (binding, case))
                        asks.append((self._ask(case, prompts, queued=queued), take))
                self._phase.add(self._launch(worker, binding, group, policy), [*asks, (written, None)])

    def _open(self, measured: Measured, cases: Sequence[Case], prompts: Mapping[Case, list[int]]) -> None:
        for (binding, worker), group in _by(cases, lambda c: (_withheld(c), c.reads)).items():
            asks = [(self._ask(case, prompts), partial(_keep_reader, measured, "withheld", case)) for case in group]
            for probe in PROBES:
                if set(probe.dimensions).isdisjoint(group[0].dimensions):
                    take = partial(_keep, measured.probes, (group[0].dimensions, probe))
                    asks.append((self._ask(probe, prompts), take))
            self._phase.add(self._launch(worker, binding, group), asks)

    def _refer(self, measured: Measured, cases: Sequence[Case], prompts: Mapping[Case, list[int]]) -> None:
        for worker, group in _by(cases, lambda c: c.reads).items():
            everything = [*group, OWN] if worker == FIRST else group
            asks = [(self._ask(case, prompts), partial(_keep_reference, measured, case)) for case in everything]
            self._phase.add(self._launch(worker, "reference", group), asks)

    def _read_again(self, measured: Measured, cases: Sequence[Case], prompts: Mapping[Case, list[int]]) -> None:
        for worker, group in _by(cases, lambda c: c.reads).items():
            asks = [(self._ask(c, prompts), partial(_keep, measured.again, ("bound", c))) for c in group]
            self._phase.add(self._launch(worker, "bound", group), asks)
        self._phase.execute()

    def _roll_back(self, measured: Measured, prompts: Mapping[Case, list[int]]) -> None:
        cases = [case for case in measured.cases if case.exchanges]
        asks = [(self._ask(case, prompts), partial(_keep, measured.rollback, case)) for case in cases]
        self._phase.add(self._launch(FIRST, "bound", cases), asks)
        self._phase.execute()


def _by(cases: Iterable[Case], key: Callable[[Case], Any]) -> dict[Any, list[Case]]:
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return groups


def _withheld(case: Case) -> str:
    return f"withheld:{','.join(case.dimensions)}"


def _is_kv(cases: Sequence[Case]) -> bool:
    return cases[0].dimensions[-1] == "kv_representation"


def _expect_nothing(attempt: Attempt, _log: str) -> None:
    assert attempt.stored == 0, "the writer is the first"


def _keep(kept: dict[Any, Attempt], key: Any, attempt: Attempt, _log: str) -> None:
    kept[key] = attempt


def _keep_reader(measured: Measured, binding: str, case: Case, attempt: Attempt, log: str) -> None:
    measured.foreign[binding, case] = attempt
    measured.logs[binding, case] = log


def _keep_reference(measured: Measured, case: Case, attempt: Attempt, _log: str) -> None:
    assert attempt.answer is not None
    measured.references[case] = attempt.answer
