"""vLLM's ExampleConnector (once named SharedStorageConnector), bound by view.

It names entries by a hash of prompt tokens and content identifiers, at lookup from the request, and at load and store
from the metadata that its scheduler half sends to its worker half. Showing it requests with one more identifier
therefore binds all of these sites at once.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from kvprov.engines.vllm import connectors, seams
from kvprov.engines.vllm.binding import EngineBinding
from kvprov.engines.vllm.metrics import BypassMetrics, BypassStats
from kvprov.engines.vllm.stamp import Stamp, stamp_of
from kvprov.errors import BindingError


class _Identifier:
    """A content identifier in the shape of a multimodal feature, which is what the connector reads."""

    __slots__ = ("identifier",)

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier


class _BoundView:
    """A request as the connector sees it: itself, with one more content identifier."""

    def __init__(self, request: Any, stamp: Stamp) -> None:
        self._request = request
        self.mm_features = [*request.mm_features, _Identifier(stamp.identifier)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class BoundExampleConnector(ExampleConnector):  # type: ignore[misc]
    """ExampleConnector whose keys are bound to provenance.

    Beyond that, it keeps away from the tier in the cases that the connector itself cannot handle: requests whose
    provenance is not known, prompt embeddings (its key would hold no content at all), prefills in chunks (it would
    store a part under the name of the whole) and requests that resume after a preemption (it would look for an entry
    that was never written).

    Raises:
        BindingError: Binding is not in effect in this process.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if not seams.installed():
            raise BindingError(
                f"kvprov is not in effect in this process, although {connectors.EXPLICIT_MODULE} is configured.",
                "Let VLLM_PLUGINS be unset or name kvprov, and let KVPROV_MODE be unset or enforce; or, to run without "
                "any protection, remove kv_connector_module_path.",
            )
        connectors.check_shape(vllm_config.parallel_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, Any] = {}
        self._binding: EngineBinding | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._binding = seams.binding_of_starting_engine()

    # Scheduler half.

    def _reason_to_bypass(self, request: Any) -> str:
        stamp = stamp_of(request)
        if stamp is None:
            return "no digest: the request did not pass through a bound engine"
        if stamp.reason:
            return stamp.reason
        if request.prompt_embeds is not None or not request.prompt_token_ids:
            return "prompt embeddings: the connector's keys are made of tokens"
        return ""

    def on_new_request(self, request: Any) -> None:
        """Keep the request, since the metadata is built from a record of it that lacks the salt."""
        super().on_new_request(request)
        self._requests[request.request_id] = request
        reason = self._reason_to_bypass(request)
        if reason and self._binding is not None:
            self._binding.bypasses.note(request.request_id, reason)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._requests.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def _view(self, request: Any) -> _BoundView:
        stamp = stamp_of(request)
        assert stamp is not None
        return _BoundView(request, stamp)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up the bound key."""
        if self._reason_to_bypass(request) or request.num_preemptions > 0:
            return 0, False
        matched, is_async = super().get_num_new_matched_tokens(self._view(request), num_computed_tokens)
        # The connector counts from the start of the prompt: with more than that in the local cache it goes negative.
        return max(matched or 0, 0), is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a load under the bound key."""
        if num_external_tokens > 0:
            super().update_state_after_alloc(self._view(request), blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Name entries to load and to store by the bound key."""
        bound = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is None or self._reason_to_bypass(request):
                continue
            loads = new.req_id in self._requests_need_load
            scheduled = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            if not loads and scheduled < len(new.prompt_token_ids or ()):
                if self._binding is not None:
                    self._binding.bypasses.note(
                        new.req_id, "chunked prefill: the connector would store a part as the whole"
                    )
                continue
            stamp = stamp_of(request)
            assert stamp is not None
            bound.append(_BoundView(new, stamp))
        view = copy.copy(scheduler_output)
        view.scheduled_new_reqs = bound
        return super().build_connector_meta(view)

    def get_kv_connector_stats(self) -> BypassStats | None:
        """Report how many requests bypassed the tier."""
        return None if self._binding is None else BypassStats(self._binding.bypasses.tell())

    # The process that serves metrics.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BypassStats:
        """Return such a report as it arrived."""
        return BypassStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> BypassMetrics:
        """Return what keeps the metric."""
        return BypassMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The engine's self-check, in both halves.

    def kvprov_lookup_key(self, request: Any) -> str:
        """Return the name of the entry that a lookup of `request` asks for."""
        asked: list[str] = []
        native = self._generate_foldername_debug

        def recording(*args: Any, **kwargs: Any) -> str:
            asked.append(native(*args, **kwargs))
            return asked[-1]

        self.__dict__["_generate_foldername_debug"] = recording
        try:
            self.get_num_new_matched_tokens(request, 0)
        finally:
            del self.__dict__["_generate_foldername_debug"]
        return "|".join(asked)

    def kvprov_metadata(self, scheduler_output: Any, requests: list[Any]) -> Any:
        """Return what the worker half would be sent for `requests`, without keeping them."""
        kept, self._requests = self._requests, {request.request_id: request for request in requests}
        try:
            return self.build_connector_meta(scheduler_output)
        finally:
            self._requests = kept

    def kvprov_entry_key(self, entry: Any) -> str:
        """Return the name under which one entry of the metadata is loaded or stored."""
        return str(self._generate_foldername_debug(entry.token_ids, entry.mm_hashes))
