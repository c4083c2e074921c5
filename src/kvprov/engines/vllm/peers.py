"""Peers: the other engines from which a request may have its state fetched (OffloadingConnector's p2p tier).

Requests name them, in `kv_transfer_params`. A peer answers for any key with whatever bytes it likes, which the engine
then holds under that key, for every request of the same provenance. So it is the operator who says which are peers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from kvprov.engines.vllm.log import logger

_LOGGED: Final = 100

SOURCES: Final = ("remote_prefiller", "remote_kv_source")
"""Members of `kv_transfer_params` that name where to fetch from."""


class Strangers:
    """Peers that requests named and the operator did not: the first few are logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, strangers: Collection[str]) -> None:
        """Log those that were not logged yet."""
        # A client chose them: no line of their own, and no more than fits one.
        for peer in (ascii(stranger)[1:-1][:80] for stranger in strangers):
            if peer not in self._logged and len(self._logged) < _LOGGED:
                self._logged.add(peer)
                logger.warning(
                    "kvprov: a request names the peer %s, which KVPROV_PEERS does not list: it is not asked.", peer
                )


def named(parameters: Any) -> list[str]:
    """Return the peers, HOST:PORT, that a request's parameters name."""
    if not isinstance(parameters, Mapping):
        return []
    sources = [source for name in SOURCES if (source := parameters.get(name))]
    # What is no mapping names nobody that could be listed; and vLLM would fail on it.
    return [f"{s.get('remote_host')}:{s.get('remote_port')}" if isinstance(s, Mapping) else str(s) for s in sources]


def allowed(parameters: Any, peers: Collection[str]) -> tuple[Any, list[str]]:
    """Return a request's parameters without peers that are not listed, and these.

    Args:
        parameters: What the client, or a router on its behalf, put into `kv_transfer_params`.
        peers: HOST:PORT of each engine that is one.
    """
    strangers = [peer for peer in named(parameters) if peer not in peers]
    if not strangers:
        return parameters, []
    return {name: value for name, value in parameters.items() if name not in SOURCES}, strangers
