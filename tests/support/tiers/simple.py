"""vLLM's SimpleCPUOffloadConnector, which keeps blocks in its own engine's host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.tiers import Tier

BYTES = 32 << 20


class _Event:
    """Stands in for a device's event: on a CPU, what was launched is done."""

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """Stands in for a device's stream."""

    def __init__(self, priority: int = 0) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_event(self, _event: object) -> None: ...


class _Torch:
    """The module, with the streams and events of a device that computes at once."""

    Event = _Event
    cuda = SimpleNamespace(Stream=_Stream, current_stream=_Stream)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def _pairs(sources: Mapping[str, Any], targets: Mapping[str, Any], *_: object, **__: object) -> list[tuple[Any, Any]]:
    return [(source, targets[name]) for name, source in sources.items()]


def _copy(sources: Sequence[int], targets: Sequence[int], pairs: list[tuple[Any, Any]]) -> None:
    for ours, theirs in pairs:
        for source, target in zip(sources, targets, strict=True):
            theirs[target].copy_(ours[source])


def prepare() -> None:
    """Make ready the process of an engine that runs the connector without a GPU: plain copies for the device's."""
    from vllm.v1.simple_kv_offload import copy_backend, worker

    for module in (copy_backend, worker):
        module.torch = _Torch()
    worker.PIN_MEMORY = False
    copy_backend.build_params = _pairs
    copy_backend.copy_blocks = _copy


@contextmanager
def store(folder: Path) -> Iterator[Tier]:
    """The memory of each engine. Its own cache is so small that what it loses must come from there."""
    del folder
    yield Tier(
        "simple-cpu",
        {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": BYTES}},
        args={"enable_prefix_caching": True},
        before=prepare,
        settle=0.5,
    )
