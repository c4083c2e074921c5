"""vLLM's ExampleConnector (once named SharedStorageConnector), bound by view.

It names entries by a hash of prompt tokens and content identifiers, at lookup from the request, and at load and store
from the metadata that its scheduler half sends to its worker half. Showing it requests with one more identifier
therefore binds all of these sites at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector as Native

from kvprov.engines.vllm import connectors, inputs
from kvprov.engines.vllm.bound import BoundView, KeepsRequests, scheduled
from kvprov.engines.vllm.stamp import stamp_of


class ExampleConnector(KeepsRequests, Native):  # type: ignore[misc]
    """ExampleConnector whose keys are bound to provenance.

    Beyond that, it keeps away from the tier in the cases that the connector itself cannot handle: prompt embeddings
    (its key would hold no content at all), prefills in chunks (it would store a part under the name of the whole) and
    requests that resume after a preemption (it would look for an entry that was never written).

    Raises:
        BindingError: Binding is not in effect in this process, or several ranks would share one file.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        connectors.check_shape(vllm_config.parallel_config, "ExampleConnector")
        super().__init__(vllm_config, role, kv_cache_config)

    # Scheduler half.

    def reason_to_bypass(self, request: Any) -> str:
        """Return why `request` must not touch the tier; empty when it may."""
        return super().reason_to_bypass(request) or inputs.beyond_tokens(request)

    def _view(self, request: Any) -> BoundView:
        stamp = stamp_of(request)
        assert stamp is not None
        return BoundView(request, stamp)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up the bound key."""
        if self.reason_to_bypass(request) or request.num_preemptions > 0:
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
            if request is None or self.reason_to_bypass(request):
                continue
            loads = new.req_id in self._requests_need_load
            scheduled_tokens = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            if not loads and scheduled_tokens < len(new.prompt_token_ids or ()):
                if self._binding is not None:
                    self._binding.bypasses.note(
                        new.req_id, "chunked prefill: the connector would store a part as the whole"
                    )
                continue
            stamp = stamp_of(request)
            assert stamp is not None
            bound.append(BoundView(new, stamp))
        view = copy.copy(scheduler_output)
        view.scheduled_new_reqs = bound
        return super().build_connector_meta(view)

    # The engine's self-check, in both halves.

    def _lookup_key(self, request: Any) -> str:
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

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the names of the entries that are looked up, and the metadata that a worker is sent for them."""
        lookups = [self._lookup_key(request) for request in requests]
        kept, self._requests = self._requests, {request.request_id: request for request in requests}
        try:
            metadata = self.build_connector_meta(scheduled(requests))
        finally:
            self._requests = kept
        return lookups, list(metadata.requests)

    def kvprov_entry_key(self, entry: Any) -> str:
        """Return the name under which one entry of the metadata is loaded or stored."""
        return str(self._generate_foldername_debug(entry.token_ids, entry.mm_hashes))
