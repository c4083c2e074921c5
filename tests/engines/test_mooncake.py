"""MooncakeStoreConnector over a real store in processes of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import exchanges
from tests.support.engine import Adapter, Answer, Engine, Launch
from tests.support.exchanges import Exchanged
from tests.support.models import BLOCK, BUNDLED, Models
from tests.support.mooncake import MooncakeServer
from tests.support.processes import EngineDiedError, Processes, Run, Step
from tests.support.steps import bypassed, call, generate, loaded, same, tokens
from tests.support.tiers import Tier
from tests.support.tiers.mooncake import running

pytestmark = pytest.mark.engine

GENERATED = 4
RECOMPUTE = {"kv_load_failure_policy": "recompute"}


def settle(engine: Engine, *, seconds: float) -> None:
    """Take a step in which what was stored is reported, and wait for what was not."""
    engine.generate([[11, 12, 13]], tokens=1)
    time.sleep(seconds)


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


@dataclass
class Fleet:
    """Engines over one store.

    Attributes:
        runs: By what was different about each.
        names: What the store held after some of them.
    """

    runs: dict[str, Run]
    names: dict[str, set[str]]

    def answers(self, name: str) -> list[Answer]:
        answers: list[Answer] = self.runs[name].results[0]
        return answers


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MooncakeServer, Tier]]:
    with running(tmp_path_factory.mktemp("mooncake")) as found:
        yield found


def over(tier: Tier, model: str, mode: str = "enforce", **more: Any) -> Launch:
    env = {**tier.env, **more.pop("env", {})}
    return Launch(model, Path(), mode, connector=tier.connector, env=env, before=tier.before, **more)


@pytest.fixture(scope="module")
def fleet(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    up: tuple[MooncakeServer, Tier],
    tmp_path_factory: pytest.TempPathFactory,
) -> Fleet:
    server, tier = up
    folder = tmp_path_factory.mktemp("fleet")
    # Two models whose paths end alike, and the first one again at a path that ends otherwise.
    model, other = (models.copy_base(folder / name / "model") for name in ("one", "two"))
    models.perturb(Path(other))
    moved = models.copy_base(folder / "moved")
    adapter = models.adapter("standard", 1, "tenant", folder / "tenant")
    elsewhere = models.adapter("standard", 7, "renamed", folder / "another")
    pickled = _pickled(folder / "pickled")
    runs: dict[str, Run] = {}
    names: dict[str, set[str]] = {}
    wait = partial(settle, seconds=tier.settle)

    def ask(adapter: Adapter = adapter) -> Step:
        return partial(generate, prompts=prompts, adapter=adapter, tokens=GENERATED)

    def run(plans: dict[str, tuple[Launch, list[Step]]]) -> None:
        for name, ended in zip(plans, processes.run_all(list(plans.values())), strict=True):
            runs[name] = ran(ended)
            names[name] = set(server.keys())

    run({"stock": (over(tier, model, "off"), [ask(), wait]), "isolated": (Launch(model, None, "off"), [ask()])})
    run({"without kvprov": (over(tier, model, "off", env={"VLLM_PLUGINS": "none"}), [ask(), wait])})
    run({"weights, stock": (over(tier, other, "off"), [ask()]), "first": (over(tier, model), [ask(), wait])})
    run(
        {
            "elsewhere": (over(tier, moved), [ask(elsewhere), wait]),
            "weights": (over(tier, other), [ask(), wait]),
        }
    )
    run(
        {
            "unknown": (
                over(tier, moved),
                [ask(pickled), wait, ask(pickled), wait, partial(bypassed, reason="adapter")],
            )
        }
    )
    return Fleet(runs, names)


def _pickled(folder: Path) -> Adapter:
    """Return an adapter that nothing is known of."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(BUNDLED / "adapters" / "inverted", folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    return Adapter("pickled", 3, str(folder))


def test_stock_mixes_up_models_whose_paths_end_alike(fleet: Fleet, full: int) -> None:
    assert loaded(fleet.answers("stock")) == 0
    assert loaded(fleet.answers("weights, stock")) == full
    assert not same(fleet.answers("weights, stock"), fleet.answers("weights"))


def test_bound_they_do_not_meet(fleet: Fleet) -> None:
    assert loaded(fleet.answers("first")) == loaded(fleet.answers("weights")) == 0
    assert same(fleet.answers("first"), fleet.answers("isolated"))


def test_a_new_process_shares_whatever_model_and_adapter_are_called(fleet: Fleet, full: int) -> None:
    assert loaded(fleet.answers("elsewhere")) == full > 0
    assert same(fleet.answers("elsewhere"), fleet.answers("isolated"))


def test_off_is_stock(fleet: Fleet, full: int) -> None:
    alone = fleet.runs["without kvprov"]
    assert "kvprov:" not in alone.log
    assert loaded(fleet.answers("without kvprov")) == full
    assert fleet.names["without kvprov"] == fleet.names["stock"]
    assert len(fleet.names["stock"]) * BLOCK == full


def test_names_say_the_shape_and_hold_no_path(fleet: Fleet, full: int) -> None:
    bound = fleet.names["weights"] - fleet.names["stock"]
    assert len(bound) * BLOCK == 2 * full
    assert all(name.startswith("kvprov-tp1-pp1-pcp1-dcp1@tp_rank:0@") for name in bound)


def test_unknown_provenance_leaves_nothing_and_finds_nothing(
    fleet: Fleet, prompts: list[list[int]], models: Models
) -> None:
    first, _, second, _, bypasses = fleet.runs["unknown"].results
    assert loaded(first) == loaded(second) == 0
    assert tokens(first) == tokens(second)
    assert fleet.names["unknown"] == fleet.names["weights"]
    # Those, and the requests without an adapter by which this test settles: here these are bypassed, too.
    assert bypasses == 2 * len(prompts) + 2


@pytest.fixture(scope="module")
def exchanged(
    processes: Processes, models: Models, up: tuple[MooncakeServer, Tier], tmp_path_factory: pytest.TempPathFactory
) -> Exchanged:
    scene = exchanges.scene(models, tmp_path_factory.mktemp("scene"))
    return exchanges.play(processes, scene, over(up[1], scene.old), up[1].settle)


def test_the_exchanges_took_place_beneath_requests(exchanged: Exchanged) -> None:
    assert exchanged.took_place()
    assert exchanged.witness.keeps_what_was_handed_out()


@pytest.mark.parametrize("stage", exchanges.STAGES)
def test_requests_under_way_leave_each_provenance_its_own(exchanged: Exchanged, stage: str) -> None:
    assert exchanged.unexpected(stage) == {}
    assert same(exchanged.read[stage], exchanged.right[stage])


class Spy:
    """Notes the keys that each part of the connector is given, in the engine's process."""

    def __init__(self, prepare: Any) -> None:
        self._prepare = prepare
        self.keys: dict[str, list[str]] = {}

    def __call__(self) -> None:
        import mooncake.store

        self._prepare()
        native = mooncake.store.MooncakeDistributedStore
        keys = self.keys

        class Watched:
            """The store's client, whose calls are noted."""

            def __init__(self) -> None:
                self._native = native()

            def __getattr__(self, name: str) -> Any:
                method = getattr(self._native, name)
                if not name.startswith(("batch_is", "batch_get", "batch_put")):
                    return method

                def noted(names: list[str], *args: Any, **kwargs: Any) -> Any:
                    keys.setdefault(name, []).extend(names)
                    return method(names, *args, **kwargs)

                return noted

        mooncake.store.MooncakeDistributedStore = Watched

    def tell(self) -> dict[str, set[str]]:
        return {site: set(names) for site, names in self.keys.items()}


def test_every_site_goes_by_the_names_in_the_store_until_its_master_dies(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path
) -> None:
    """Then nothing is found, and requests are answered all the same."""
    ask = partial(generate, prompts=prompts, tokens=GENERATED)
    with running(tmp_path / "store") as (server, tier):
        wait = partial(settle, seconds=tier.settle)

        def run(*more: Step) -> list[Any]:
            spy = Spy(tier.before)
            launch = Launch(models.base, tmp_path, connector=tier.connector, env=tier.env, before=spy)
            return processes.run(launch, ask, wait, partial(call, function=spy.tell), *more).results

        seeded, _, wrote = run()
        names = set(server.keys())
        # One request, since each waits for the master until it gives up.
        one = partial(generate, prompts=prompts[:1], tokens=GENERATED)
        read, _, asked, _, again = run(partial(call, function=server.kill_from_elsewhere("mooncake_master")), one)
    assert (loaded(seeded), loaded(read), loaded(again)) == (0, full, 0)
    assert same(read, seeded)
    assert same(again, seeded[:1])
    put = {name for site in wrote if "put" in site for name in wrote[site]}
    got = {name for site in asked if "get" in site for name in asked[site]}
    assert put == got == asked["batch_is_exist"] == names
    assert len(names) * BLOCK == full


def test_entries_whose_holder_died_end_requests_as_vllm_is_told_to(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The master still knows the names, so loads fail. By vLLM's default, so does the request, bound or not."""
    ask = partial(generate, prompts=prompts[:1], tokens=GENERATED)
    given: dict[str, list[tuple[int, ...]]] = {}
    for name, mode, policy in (("stock", "off", {}), ("bound", "enforce", {}), ("told", "enforce", RECOMPUTE)):
        with running(tmp_path / name) as (server, tier):
            launch = Launch(
                models.base, tmp_path, mode, {**tier.env}, {}, {**tier.connector, **policy}, (), tier.before
            )
            kill = partial(call, function=server.kill_from_elsewhere("mooncake_client"))
            first, _, _, again = processes.run(launch, ask, partial(settle, seconds=tier.settle), kill, ask).results
            right = tokens(first)
            given[name] = tokens(again)
    assert given["stock"] == given["bound"] == [()]
    assert given["told"] == right
