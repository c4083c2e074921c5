"""SimpleCPUOffloadConnector: in one engine's memory, what the engine's own cache has lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import exchanges
from tests.support.engine import Answer, Engine, Launch
from tests.support.exchanges import Exchanged, Scene, Witness
from tests.support.models import Models
from tests.support.processes import Processes, Step
from tests.support.steps import same
from tests.support.tiers.simple import store

pytestmark = pytest.mark.engine


def play(engine: Engine, *, scene: Scene, settle: float) -> tuple[Witness, set[str], dict[str, list[Answer]], set[str]]:
    """Go through the exchanges, and read what they left in the same engine: nobody else has its memory."""
    hashed: set[str] = set()
    hasher = engine.core.request_block_hasher

    def noting(request: Any) -> Any:
        new = hasher(request)
        hashed.update(block.hex() for block in new)
        return new

    engine.core.request_block_hasher = noting
    witness = exchanges.write(engine, scene=scene, settle=settle)
    # The engine's own cache forgets; the connector's stays.
    assert engine.llm.llm_engine.reset_prefix_cache()
    kept = keys(engine)
    before = engine.external_hits()
    answers = exchanges.read(engine, scene=scene, prompts=list(exchanges.named(scene, witness).values()))
    assert engine.external_hits() > before
    return witness, kept, answers, hashed


def keys(engine: Engine) -> set[str]:
    """Return the hashes under which the connector keeps blocks."""
    manager = engine.core.scheduler.get_kv_connector().scheduler_manager
    return {bytes(key)[:-4].hex() for key in manager.cpu_block_pool.cached_block_hash_to_block._cache}


@pytest.fixture(scope="module")
def scene(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return exchanges.scene(models, tmp_path_factory.mktemp("scene"))


def run(processes: Processes, scene: Scene, mode: str) -> tuple[Exchanged, set[str], set[str]]:
    with store(scene.folder) as tier:
        launch = Launch(
            scene.old,
            Path(),
            mode,
            connector=tier.connector,
            args={**tier.args, **exchanges.ARGS},
            before=tier.before,
        )
        witness, kept, got, hashed = processes.run(launch, partial(play, scene=scene, settle=tier.settle)).results[0]
    prompts = exchanges.named(scene, witness)
    ask: Step = partial(exchanges.read, scene=scene, prompts=list(prompts.values()))
    right = processes.run(Launch(scene.old, None, "off"), ask).results[0]
    return Exchanged(witness, got, right, prompts), kept, hashed


@pytest.fixture(scope="module")
def bound(processes: Processes, scene: Scene) -> tuple[Exchanged, set[str], set[str]]:
    return run(processes, scene, "enforce")


def test_the_exchanges_took_place_beneath_requests(bound: tuple[Exchanged, set[str], set[str]]) -> None:
    assert bound[0].took_place()
    assert bound[0].witness.keeps_what_was_handed_out()


@pytest.mark.parametrize("stage", exchanges.STAGES)
def test_requests_under_way_leave_each_provenance_its_own(
    bound: tuple[Exchanged, set[str], set[str]], stage: str
) -> None:
    exchanged, _, _ = bound
    # It stores a block some steps after it was computed: what had not been stored at an exchange never is.
    missing = {"running": 0, "adapted running": 0} if stage == "old weights" else {}
    assert exchanged.unexpected(stage) == missing
    assert same(exchanged.read[stage], exchanged.right[stage])


def test_blocks_are_kept_under_the_bound_hashes(bound: tuple[Exchanged, set[str], set[str]]) -> None:
    _, kept, hashed = bound
    assert kept
    assert kept <= hashed


def test_stock_reads_foreign_state(processes: Processes, scene: Scene) -> None:
    """The control."""
    exchanged, _, _ = run(processes, scene, "off")
    for stage in exchanges.STAGES[1:]:
        assert not same(exchanged.read[stage], exchanged.right[stage]), stage
