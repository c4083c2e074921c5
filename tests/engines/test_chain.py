"""The block-hash chain of a live engine: what is in it, and what its events tell."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.support.engine import Adapter, Engine, Launch
from tests.support.models import Models, loadable
from tests.support.processes import Processes
from tests.support.steps import generate, loaded

pytestmark = pytest.mark.engine

SALT = "a-salt-that-must-not-show"


def events_of(engine: Engine, *, prompts: list[list[int]], adapter: Adapter) -> tuple[str, list[bytes], list[Any]]:
    """Return the text of all events that a salted request with an adapter causes, its hashes and extra keys."""
    published: list[Any] = []
    publisher = engine.core.scheduler.kv_event_publisher
    publisher.publish = published.append
    hashes: list[bytes] = []
    admit = engine.core.scheduler.add_request

    def noting(request: Any) -> None:
        hashes.extend(bytes(block) for block in request.block_hashes)
        admit(request)

    engine.core.scheduler.add_request = noting
    engine.generate(prompts, adapter=adapter, salt=SALT, tokens=1)
    keys = [event.extra_keys for batch in published for event in batch.events if hasattr(event, "extra_keys")]
    return repr(published), hashes, keys


EVENTS = {"enable_prefix_caching": True, "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_events_carry_a_digest_in_place_of_salt_and_path(processes: Processes, models: Models, mode: str) -> None:
    adapter = models.adapter("standard")
    run = processes.run(
        Launch(models.base, None, mode, args=EVENTS),
        partial(events_of, prompts=models.prompts(1), adapter=adapter),
    )
    text, hashes, keys = run.results[0]
    assert "BlockStored" in text
    assert len(hashes) == len(models.prompts(1)[0]) // 32
    if mode == "off":
        # The control: stock publishes the salt, so looking for it can succeed.
        assert SALT in text
        return
    assert SALT not in text
    assert adapter.path not in text
    first, *later = keys[0]
    assert len(first) == 1
    assert len(first[0]) == 43
    assert later
    assert not any(later)
    assert SALT not in run.log


@pytest.mark.parametrize("bits", ["128", "256"])
def test_the_prefix_cache_tells_salts_and_adapters_apart(processes: Processes, models: Models, bits: str) -> None:
    prompts = models.prompts(2)
    full = sum(loadable(len(prompt)) for prompt in prompts)
    ask = partial(generate, prompts=prompts, tokens=1, one_by_one=True)
    run = processes.run(
        Launch(models.base, None, env={"KVPROV_DIGEST_BITS": bits}, args={"enable_prefix_caching": True}),
        partial(ask, salt="a"),
        partial(ask),
        partial(ask),
        partial(ask, adapter=models.adapter("standard", 1), salt="a"),
        partial(ask, adapter=models.adapter("standard", 1), salt="a"),
        partial(ask, adapter=models.adapter("inverted", 2), salt="a"),
        partial(ask, adapter=models.adapter("standard", 1), salt="b"),
    )
    assert [loaded(answers) for answers in run.results] == [0, 0, full, 0, full, 0, 0]


def negate(worker: Any) -> None:
    """What a trainer may do to a worker: here, to turn every weight around."""
    for parameter in worker.get_model().parameters():
        parameter.data.neg_()


def call(engine: Engine, *, method: Any) -> None:
    engine.llm.collective_rpc(method)


@pytest.mark.parametrize("method", ["reset_weights", negate], ids=["reset_weights", "any function"])
def test_what_may_change_weights_ends_trust_in_them(
    processes: Processes, models: Models, store: Any, prompts: list[list[int]], full: int, method: Any
) -> None:
    """A trainer's own methods have names that nobody can list: so all but those known to keep them count."""
    ask = partial(generate, prompts=prompts, tokens=4, one_by_one=True)
    run = processes.run(
        Launch(models.base, store, args={"enable_prefix_caching": True}), ask, ask, partial(call, method=method), ask
    )
    assert [loaded(run.results[i]) for i in (0, 1, 3)] == [0, full, 0]
    assert len(list(store.iterdir())) == len(prompts)


def test_what_keeps_weights_keeps_trust(
    processes: Processes, models: Models, store: Any, prompts: list[list[int]], full: int
) -> None:
    ask = partial(generate, prompts=prompts, tokens=4)
    run = processes.run(
        Launch(models.base, store), ask, partial(call, method="check_health"), partial(call, method="list_loras"), ask
    )
    assert [loaded(run.results[i]) for i in (0, 3)] == [0, full]


def test_weights_that_sleep_drops_are_not_trusted(
    processes: Processes, models: Models, store: Any, prompts: list[list[int]], full: int
) -> None:
    ask = partial(generate, prompts=prompts, tokens=4)
    steps = [ask, partial(sleep, level=1), ask, partial(sleep, level=2), ask]
    run = processes.run(Launch(models.base, store), *steps)
    assert [loaded(run.results[i]) for i in (0, 2, 4)] == [0, full, 0]


def sleep(engine: Engine, *, level: int) -> None:
    engine.llm.sleep(level)
    engine.llm.wake_up()
