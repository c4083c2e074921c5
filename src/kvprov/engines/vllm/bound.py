"""What all bound connectors have in common."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvprov.engines.vllm import connectors, inputs, seams
from kvprov.engines.vllm.binding import EngineBinding
from kvprov.engines.vllm.stamp import Stamp, stamp_of
from kvprov.errors import BindingError


class _Identifier:
    """A content identifier in the shape of a multimodal feature, which is what connectors read."""

    __slots__ = ("identifier",)

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier


class BoundView:
    """A request as a connector sees it that hashes content identifiers: itself, with one more of them."""

    def __init__(self, request: Any, stamp: Stamp) -> None:
        self._request = request
        media = [_Identifier(inputs.located(feature)) for feature in request.mm_features]
        self.mm_features = [*media, _Identifier(stamp.identifier)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class BoundConnector:
    """Stands before one of vLLM's connector classes, in a class that carries the same name.

    vLLM finds a connector's statistics by its class's name, so a bound class must be called like the native one.

    Raises:
        BindingError: Binding is not in effect in this process.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        if not seams.SEAMS.installed:
            raise BindingError(
                f"kvprov is not in effect in this process, although {connectors.EXPLICIT_MODULE} is configured.",
                "Let VLLM_PLUGINS be unset or name kvprov, and let KVPROV_MODE be unset or enforce; or, to run without "
                "any protection, remove kv_connector_module_path.",
            )
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._binding: EngineBinding | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._binding = seams.binding_of_starting_engine()

    def reason_to_bypass(self, request: Any) -> str:
        """Return why `request` must not touch the tier; empty when it may."""
        stamp = stamp_of(request)
        if stamp is None:
            return "no digest: the request did not pass through a bound engine"
        return stamp.reason

    def kvprov_rebound(self, request: Any) -> None:
        """Forget what is kept under the former key of a request under way, which has just been stamped anew.

        Whatever the connector does for it from now on goes by the new stamp; where that one has a reason to bypass,
        nothing of the request may be stored or loaded any more.
        """

    def kvprov_granularity(self, block_size: int) -> int:
        """Return of how many tokens the connector makes a key, in an engine whose blocks hold `block_size`."""
        return block_size

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return, for each of `requests`, the key that a lookup asks for, and the entry that a worker would be sent.

        For the self-check: by the connector's own code, without touching the store and without keeping anything.
        Entries are sent to worker processes, so they can be pickled.
        """
        raise NotImplementedError

    def kvprov_entry_key(self, entry: Any) -> str:
        """Return the key under which the worker half would load or store `entry`, as `kvprov_probe` spells it."""
        raise NotImplementedError


class KeepsRequests(BoundConnector):
    """Keeps requests while they are unfinished: metadata is built from vLLM's records of them, which lack the stamp."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, Any] = {}

    def on_new_request(self, request: Any) -> None:
        """Keep the request."""
        super().on_new_request(request)  # type: ignore[misc]
        self._requests[request.request_id] = request

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._requests.pop(request.request_id, None)
        return super().request_finished(request, block_ids)  # type: ignore[misc]


def scheduled(requests: Sequence[Any]) -> Any:
    """Return a scheduler's output in which all of each request's prompt is computed in one step."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=list(request.mm_features),
                block_ids=(list(range(1 + len(request.prompt_token_ids) // 16)),),
                num_computed_tokens=0,
            )
            for request in requests
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[]),
        num_scheduled_tokens={r.request_id: len(r.prompt_token_ids) for r in requests},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
