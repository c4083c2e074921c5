"""vLLM's MultiConnector: each of its connectors is bound as itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as Native

from kvprov.engines.vllm.bound import BoundConnector


class MultiConnector(BoundConnector, Native):  # type: ignore[misc]
    """MultiConnector whose connectors are bound."""

    def reason_to_bypass(self, request: Any) -> str:
        """Return why `request` must not touch one of the tiers at least; empty when it may touch all.

        Each connector asks itself. This is what is counted, once for each request.
        """
        reasons = (connector.reason_to_bypass(request) for connector in self._connectors)
        return next(filter(None, reasons), "")

    def kvprov_rebound(self, request: Any) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.kvprov_rebound(request)


def leaves(connector: Any) -> Iterator[Any]:
    """Give `connector`, or, where it hands requests on, those below it."""
    if isinstance(connector, MultiConnector):
        for child in connector._connectors:
            yield from leaves(child)
    else:
        yield connector
