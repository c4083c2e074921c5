"""State that may be shared and that SGLang's own keys do not let meet, and names that meet and must not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.sglang.engine import PAGE, Answer, Engine, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.processes import Processes
from tests.support.sglang.results import record, row
from tests.support.sglang.steps import flush, generate, stored, written
from tests.support.steps import same

pytestmark = pytest.mark.engine

MODES = {"off": "unbound", "enforce": "bound"}


def _record(
    case: str, dimension: str, mode: str, full: int, *, foreign: int = 0, own: int | None = None, matches: bool = True
) -> None:
    binding = MODES[mode]
    record([row(PAGE, case, dimension, binding, foreign=foreign, own=own, loadable=full, matches=matches)])


def _load_and_ask(engine: Engine, *, name: str, path: str, tensors: bool, prompts: list[list[int]]) -> list[Answer]:
    """Load an adapter at run time, from a folder or from tensors, and ask with it."""
    load = engine.load_adapter_from_tensors if tensors else engine.load_adapter
    load(name, path)
    return engine.generate(prompts, adapter=name, one_by_one=True)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_adapter_shares_across_processes_whatever_it_is_called(
    processes: Processes, models: LongModels, store: Path, tmp_path: Path, mode: str
) -> None:
    """At another path, under another name, under a handle that is made at run time, and from tensors."""
    prompts = models.long_prompts(2)
    folders = [models.adapter("standard", folder=tmp_path / name).path for name in ("one", "two", "three")]
    full = [loadable(len(prompt)) for prompt in prompts]
    launch = partial(Launch, models.base, store, mode)
    first = processes.run(
        launch(adapters={"one": folders[0]}),
        partial(generate, prompts=prompts[:1], adapter="one"),
        partial(_load_and_ask, name="late", path=folders[1], tensors=False, prompts=prompts[1:]),
        written,
    )
    cold = [*first.results[0], *first.results[1]]
    assert stored(cold) == 0
    second = processes.run(
        launch(adapters={"two": folders[1]}),
        *(partial(generate, prompts=prompts, adapter="two", one_by_one=True), flush),
        *(partial(_load_and_ask, name="three", path=folders[2], tensors=False, prompts=prompts), flush),
        partial(_load_and_ask, name="four", path=folders[2], tensors=True, prompts=prompts),
    )
    asked: Sequence[list[Answer]] = second.results[::2]
    for how, answers in zip(("at another path", "under a run-time handle", "from tensors"), asked, strict=True):
        read = [answer.storage for answer in answers]
        assert read == (full if mode == "enforce" else [0, 0]), how
        assert same(answers, cold)
        # The second prompt's writer had loaded it at run time.
        for writer, tokens, whole in zip(("at launch", "at run time"), read, full, strict=True):
            _record(f"same adapter loaded {writer}, then {how}", "adapter", mode, whole, own=tokens)


@pytest.mark.parametrize("mode", MODES)
def test_served_names_neither_join_nor_separate_when_bound(
    processes: Processes,
    models: LongModels,
    store: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    full: int,
    mode: str,
) -> None:
    """Stock joins names that differ in a slash, and separates those under which the same weights are served."""
    copy, other = models.copy_base(tmp_path / "copy"), models.copy_base(tmp_path / "other")
    models.perturb(Path(other))

    def served(name: str, model: str = models.base) -> Launch:
        return Launch(model, store, mode, args={"served_model_name": name})

    ask = partial(generate, prompts=prompts)
    [cold] = processes.run(served("org/a-b"), ask, written).results[:1]
    [own] = processes.run(served("org/a-b"), ask).results
    [reference] = processes.run(Launch(other, mode=None), ask).results
    [alias] = processes.run(served("org-a/b", other), ask, written).results[:1]
    [renamed] = processes.run(served("somewhere else", copy), ask).results
    assert [stored(cold), stored(own)] == [0, full]
    assert not same(reference, cold)
    if mode == "off":
        assert [stored(alias), stored(renamed)] == [full, 0]
        assert not same(alias, reference)
    else:
        assert [stored(alias), stored(renamed)] == [0, full]
        assert same(alias, reference)
    assert same(renamed, cold)
    matches = same(alias, reference)
    _record("served names org/a-b and org-a/b, other weights", "weights", mode, full, foreign=stored(alias),
            matches=matches)  # fmt: skip
    _record("same weights under two served names", "weights", mode, full, own=stored(renamed))
