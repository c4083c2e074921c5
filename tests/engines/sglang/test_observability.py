"""What operators and subscribers see: the metric of bypassing requests, and KV events without salts."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.sglang.engine import PAGE, Engine, Launch
from tests.support.sglang.models import LongModels
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import generate

pytestmark = pytest.mark.engine

SALT = "the salt of tenant 1"


def bypassed(_engine: Engine) -> dict[str, float]:
    """Return how many requests bypassed, by kind of reason, as the engine's own endpoint would."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return {
        sample.labels["reason"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "sglang:kvprov_bypassed_requests_total"
    }


def test_bypassing_requests_are_counted(processes: Processes, models: LongModels, store: Path) -> None:
    ask = partial(generate, prompts=[models.random_prompt(64, seed=seed) for seed in range(3)], tokens=2)
    args: dict[str, Any] = {"enable_metrics": True}
    bound = processes.run(Launch(models.base, store, args=args), ask, bypassed)
    unknown = processes.run(Launch(models.base, store, args=args | {"load_format": "dummy"}), ask, bypassed)
    assert bound.results[-1] == {}
    assert unknown.results[-1] == {"weights": 3}


def events(engine: Engine, *, endpoint: str, prompts: list[list[int]], salts: list[str | None]) -> list[Any]:
    """Ask with each salt, and return the events that a subscriber receives, decoded."""
    import msgspec
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt_string(zmq.SUBSCRIBE, "")
    time.sleep(0.5)
    for salt in salts:
        engine.generate(prompts, salt=salt, tokens=2)
    received, deadline = [], time.monotonic() + 5
    while time.monotonic() < deadline and len(received) < 2 * len(salts):
        if socket.poll(500):
            received.append(msgspec.msgpack.decode(socket.recv_multipart()[-1]))
    return received


def test_kv_events_name_no_salt_and_keep_tenants_apart(processes: Processes, models: LongModels, store: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = f'{{"publisher": "zmq", "endpoint": "{endpoint.replace("127.0.0.1", "*")}", "topic": ""}}'
    step = partial(
        events, endpoint=endpoint, prompts=[models.random_prompt(4 * PAGE, seed=3)], salts=[None, SALT, "another"]
    )
    found = {
        mode: processes.run(Launch(models.base, store, mode, args={"kv_events_config": config}), step).results[0]
        for mode in ("off", "enforce")
    }
    # The control: stock publishes the salt as it is.
    assert SALT in repr(found["off"])
    assert SALT not in repr(found["enforce"])
    stored = [hashes for hashes in map(_stored, found["enforce"]) if hashes]
    assert len(stored) >= 3
    assert len({hashes[0] for hashes in stored}) >= 3


def _stored(batch: Any) -> list[int]:
    """Return the hashes of the blocks that a batch of events says were stored on the device."""
    hashes = []
    for event in batch[1]:
        fields = event if isinstance(event, list) else list(event.values())
        if fields[0] == "BlockStored":
            hashes.extend(fields[1])
    return hashes
