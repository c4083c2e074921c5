"""Attaches a binding when a scheduler is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvprov.engines.sglang import current, paths, selfcheck
from kvprov.engines.sglang.binding import SchedulerBinding
from kvprov.engines.sglang.updates import WeightUpdates


def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler.__init__` that refuses what cannot be bound, and binds the rest before a request comes."""

    def init(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        paths.check(server_args)
        original(self, server_args, *args, **kwargs)
        binding = SchedulerBinding(self)
        current.set_running(binding, WeightUpdates(binding))
        selfcheck.check()
        binding.announce(paths.describe(server_args))

    return init
