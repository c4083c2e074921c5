"""Dimensions that another package registers by entry point: nothing else changes, and they are in the real keys."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprov.contract.dimensions import BUILT_IN
from tests.support import tamper
from tests.support.engine import Launch
from tests.support.models import Models
from tests.support.packages import ACME, install
from tests.support.processes import EngineDiedError, Processes, Run
from tests.support.provenance import copied
from tests.support.steps import bypassed, generate, loaded, tokens

pytestmark = pytest.mark.engine


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


def dimensions(run: Run) -> list[str]:
    found = re.findall(r"kvprov: mode=enforce .* dimensions=(\S+) ", run.log)
    assert len(found) == 1, run.log
    return str(found[0]).split(",")


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("acme")
    return install(folder, "acme_dimensions", ACME, {"patch": "patch", "tone": "tone"})


def test_an_outside_dimension_of_either_half_is_in_the_key(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, store: Path, acme: str
) -> None:
    def ask(tone: str | None) -> partial[Any]:
        return partial(generate, prompts=prompts, **({} if tone is None else {"extra_args": {"tone": tone}}))

    def launch(store: Path, patch: str, path: tuple[str, ...] = (acme,)) -> Launch:
        return Launch(models.base, store, env={"ACME_PATCH": patch}, path=path)

    warm, curt, neither = ask("warm"), ask("curt"), ask(None)
    seed = processes.run(launch(store, "1"), warm)
    assert loaded(seed.results[0]) == 0
    stores = {name: copied(store, name) for name in ("own", "other", "without")}
    own, other, without = map(
        ran,
        processes.run_all(
            [
                (launch(stores["own"], "1"), [curt, neither, warm]),
                (launch(stores["other"], "2"), [warm, warm]),
                (launch(stores["without"], "1", ()), [warm, curt]),
            ]
        ),
    )
    # Its own value hits in another process; another tone, no tone and another patch do not.
    assert [loaded(answers) for answers in own.results] == [0, 0, full]
    assert [loaded(answers) for answers in other.results] == [0, full]
    # The control: where it is not registered, the keys are others, and the tone is in none of them.
    assert [loaded(answers) for answers in without.results] == [0, full]
    assert tokens(own.results[2]) == tokens(seed.results[0]) == tokens(without.results[1])
    built_in = [*BUILT_IN.worker, *BUILT_IN.request]
    assert dimensions(without) == built_in
    for run in (seed, own, other):
        assert sorted(dimensions(run)) == sorted([*built_in, "acme.patch", "acme.tone"])


def test_a_value_that_its_owner_cannot_tell_bypasses_the_tier(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path, acme: str
) -> None:
    """Of the worker half for all requests; of the request half for the one whose value fails, and for no other."""
    stores = {name: tmp_path / name for name in ("unknown", "failing")}
    for store in stores.values():
        store.mkdir()
    ask = partial(generate, prompts=prompts)
    failing = partial(ask, extra_args={"tone": 7})
    count = partial(bypassed, reason="acme.patch")
    unknown, of_request = map(
        ran,
        processes.run_all(
            [
                (
                    Launch(models.base, stores["unknown"], path=(acme,)),
                    [ask, ask, count],
                ),
                (
                    Launch(models.base, stores["failing"], env={"ACME_PATCH": "1"}, path=(acme,)),
                    [failing, failing, partial(bypassed, reason="acme.tone"), ask, ask],
                ),
            ]
        ),
    )
    assert [loaded(answers) for answers in unknown.results[:2]] == [0, 0]
    assert unknown.results[2] == 2 * len(prompts)
    assert tamper.listing(stores["unknown"]) == {}
    assert "acme.patch: nobody said which patch this engine runs" in unknown.log
    assert [loaded(of_request.results[step]) for step in (0, 1, 3, 4)] == [0, 0, 0, full]
    assert of_request.results[2] == 2 * len(prompts)
    assert "acme.tone: its value could not be found (AttributeError)" in of_request.log
    assert tokens(of_request.results[0]) == tokens(of_request.results[4])
    assert len({Path(name).parts[0] for name in tamper.listing(stores["failing"])}) == len(prompts)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"tone": "plain"},
            "The dimension 'tone' of acme_dimensions:plain has no prefix. Name it with the owner's",
        ),
        ({"tone": "tone", "again": "tone"}, "The dimension 'acme.tone' is declared by two entry points."),
        ({"tone": "broken"}, "The entry point 'tone' (acme_dimensions:broken) is not a kvprov Extension."),
        ({"tone": "missing"}, "The dimension 'tone' (acme_dimensions:missing) cannot be loaded"),
    ],
    ids=["no prefix", "twice", "no extension", "missing"],
)
def test_a_dimension_that_cannot_be_registered_stops_the_engine(
    processes: Processes, models: Models, store: Path, tmp_path: Path, attributes: dict[str, str], said: str
) -> None:
    path = install(tmp_path / "packages", "acme_dimensions", ACME, attributes)
    with pytest.raises(EngineDiedError) as died:
        processes.run(Launch(models.base, store, path=(path,)))
    assert died.value.message.startswith(f"SettingsError: {said}")
    assert tamper.listing(store) == {}
