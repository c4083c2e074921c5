"""Engine side: which adapter bytes the workers will compute a request with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from kvprov.contract.descriptor import Known, Unknown, Value
from kvprov.engines.vllm import worker
from kvprov.engines.vllm.pins import PinnedAdapter

Unfinished: TypeAlias = Callable[[], list[Any]]
"""Gives the requests that the scheduler has."""


def _merge(reports: list[dict[int, PinnedAdapter]]) -> dict[int, PinnedAdapter]:
    """Return what all workers agree on: an adapter that they loaded differently is not known."""
    merged: dict[int, PinnedAdapter] = {}
    for adapter_id in set().union(*reports):
        held = [report.get(adapter_id) for report in reports]
        first = held[0]
        if first is None or any(other is None or other.identity != first.identity for other in held):
            merged[adapter_id] = PinnedAdapter("", "", None, "the workers hold different adapters")
        else:
            merged[adapter_id] = first
    return merged


class EngineAdapters:
    """What the workers of one engine hold, as of the last time they were asked.

    Args:
        executor: The engine's executor.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._held: dict[int, PinnedAdapter] = {}

    def value(self, adapter_id: int) -> Value:
        """Return the value of the adapter dimension for requests with `adapter_id`."""
        held = self._held.get(adapter_id)
        if held is None or held.identity is None:
            return Unknown(f"adapter: {held.reason if held is not None else 'no worker holds it'}")
        return Known(held.identity)

    def expected(self, lora_request: Any) -> str | None:
        """Return the identity that `settle` will most likely find, or None. Safe in any thread."""
        held = self._held.get(lora_request.lora_int_id)
        return None if held is None or lora_request.load_inplace else held.identity

    def settle(self, lora_request: Any, unfinished: Unfinished) -> tuple[Value, set[int]]:
        """Return the value for `lora_request`, and the ids of adapters that were exchanged meanwhile.

        The workers are asked only when the adapter is not known yet, or when its files changed.
        """
        adapter_id = lora_request.lora_int_id
        held = self._held.get(adapter_id)
        if held is not None and not lora_request.load_inplace and held.still_at_path(lora_request):
            return self.value(adapter_id), set()
        in_flight = frozenset(r.lora_request.lora_int_id for r in unfinished() if r.lora_request is not None)
        reports = self._executor.collective_rpc(worker.ensure_adapter, args=(lora_request, in_flight))
        return self._replace(_merge(reports), adapter_id)

    def _replace(self, held: dict[int, PinnedAdapter], adapter_id: int) -> tuple[Value, set[int]]:
        before, self._held = self._held, held
        changed = {i for i, adapter in before.items() if i in held and held[i].identity != adapter.identity}
        return self.value(adapter_id), changed

    def resync(self) -> set[int]:
        """Ask the workers what they hold, and return the ids of adapters that were exchanged."""
        held = _merge(self._executor.collective_rpc(worker.adapters))
        return self._replace(held, 0)[1]
