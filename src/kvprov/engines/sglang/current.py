"""The binding of this process: SGLang runs one scheduler in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvprov.engines.sglang.binding import SchedulerBinding
    from kvprov.engines.sglang.updates import WeightUpdates

_running: list[tuple[SchedulerBinding, WeightUpdates]] = []


def binding() -> SchedulerBinding | None:
    """Return the binding of this process's scheduler, or None before it is complete."""
    return _running[-1][0] if _running else None


def updates() -> WeightUpdates | None:
    """Return what follows the weights of this process's scheduler, or None before it is complete."""
    return _running[-1][1] if _running else None


def set_running(new: SchedulerBinding, follows: WeightUpdates) -> None:
    """Note the binding of the scheduler that has just been made, and what follows its weights."""
    _running[:] = [(new, follows)]
