"""vLLM's LMCacheMPConnector, bound by salt.

Its keys, which the LMCache server makes, hold the tokens' hash, a model name, a rank and the tenant's salt. Each
request has one tracker, from which lookup, load, store and release take the salt. So the digest takes the salt's place
there; and a name for how entries are laid out takes the place of the model's path.
"""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector

from kvprov.contract.key import NONCE_BYTES, nonce
from kvprov.engines.lmcache import mp, probe
from kvprov.engines.vllm import inputs
from kvprov.engines.vllm.bound import BoundConnector, scheduled
from kvprov.engines.vllm.log import logger
from kvprov.engines.vllm.stamp import stamp_of
from kvprov.errors import BindingError

Native: Final[Any] = lmcache_mp_connector.LMCacheMPConnector
"""The class that vLLM picks: that of the lmcache package, or else a copy of its own."""

_QUERIES: Final = "lmcache.mp.transfer_intermediate_tensors"


def _check(vllm_config: Any) -> None:
    """Check that every access of the connector is bound.

    Raises:
        BindingError: It is not.
    """
    if not Native.__module__.startswith("lmcache."):
        raise BindingError(
            "vLLM uses its own copy of LMCacheMPConnector, which kvprov does not bind.",
            "Unset LMCACHE_USE_UPSTREAM_MP, and install a release of lmcache that this release of kvprov supports (see "
            "README).",
        )
    if (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get(_QUERIES):
        raise BindingError(
            f"kvprov does not bind what {_QUERIES} stores.", f"Remove {_QUERIES} from kv_connector_extra_config."
        )


def _shape(model: Any) -> dict[str, Any]:
    return {
        "architectures": sorted(model.architectures),
        "layers": model.get_total_num_hidden_layers(),
        "heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
    }


def layout_facts(vllm_config: Any) -> dict[str, Any]:
    """Return what shapes the bytes of an entry: of the whole model, so that every rank says the same."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    element = vllm_config.cache_config.cache_dtype
    return {
        "model": _shape(model),
        "draft": None if draft is None else _shape(draft),
        "element": str(model.dtype).removeprefix("torch.") if element == "auto" else str(element),
        "ranks": {
            name: getattr(parallel, f"{name}_parallel_size", 1)
            for name in ("tensor", "pipeline", "decode_context", "prefill_context")
        },
    }


def _bound_config(vllm_config: Any) -> Any:
    """Return a copy of the configuration as the connector is to see it.

    The model has no path, but a name that says how its entries are laid out. And there are no KV events: LMCache's
    name chunks by their tokens alone, so whoever reads them would take one provenance's state for another's.
    """
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = mp.layout_name(layout_facts(vllm_config))
    config.kv_events_config = None
    return config


class _Tracked:
    """A request as its tracker is to see it: without media, which are in the salt."""

    mm_features: tuple[Any, ...] = ()

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _emptied(adapter: Any) -> Any:
    """Return a copy of one of LMCache's adapters that knows of no request."""
    emptied = copy.copy(adapter)
    for name, value in vars(adapter).items():
        if isinstance(value, dict | set) and name != "_health_events":
            kept = copy.copy(value)
            kept.clear()
            setattr(emptied, name, kept)
    emptied._ensure_heartbeat_started = lambda: None
    return emptied


class LMCacheMPConnector(BoundConnector, Native):  # type: ignore[misc]
    """LMCacheMPConnector whose keys are bound to provenance.

    Raises:
        BindingError: Binding is not in effect in this process, or an access of the connector would not be bound.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _check(vllm_config)
        super().__init__(_bound_config(vllm_config), role, kv_cache_config)
        self._looks_up_no_more: set[str] = set()
        if self._binding is not None:
            adapter = self.scheduler_adapter
            # Whoever calls LMCache's HTTP interface has to name both.
            logger.info("kvprov: lmcache.model_name=%s", adapter.model_name)
            logger.info("kvprov: lmcache.world_size=%d", adapter.world_size)
            if getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False):
                logger.warning("kvprov: LMCache's own KV events are off: they name chunks by their tokens alone.")

    # Scheduler half.

    def reason_to_bypass(self, request: Any) -> str:
        """Return why `request` must not touch the tier; empty when it may."""
        return super().reason_to_bypass(request) or inputs.beyond_tokens(request)

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        known = self.request_trackers.get(request.request_id)
        tracker = super()._get_or_create_request_tracker(_Tracked(request))
        if tracker is not known:
            # Once: all that a tracker says to the server is said under one key.
            self._bind(tracker, request)
        return tracker

    def _bind(self, tracker: Any, request: Any) -> None:
        """Let `tracker` speak of `request` by its digest, or of nothing."""
        stamp = stamp_of(request)
        if stamp is None or self.reason_to_bypass(request):
            # Nothing is to be stored. If something were, then under a key that nobody can ask for.
            tracker.cache_salt = nonce(secrets.token_bytes(NONCE_BYTES)).identity
            tracker.request_configs, tracker.max_offload_tokens = None, 0
            return
        tracker.cache_salt = mp.salt_text(stamp.text, [inputs.located(item) for item in request.mm_features])
        tracker.request_configs = mp.allowed_options(tracker.request_configs)
        tracker.max_offload_tokens = (tracker.request_configs or {}).get(mp.MAX_OFFLOAD)

    def on_new_request(self, request: Any) -> None:
        """Look up ahead, where that is configured."""
        if not self.reason_to_bypass(request):
            super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up the bound key."""
        if self.reason_to_bypass(request) or request.request_id in self._looks_up_no_more:
            # The connector expects a tracker of each request that is scheduled.
            self._get_or_create_request_tracker(request)
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._looks_up_no_more.discard(request.request_id)
        # The connector may ask for the tracker of a request, also of one that ends before it was ever looked up.
        self._get_or_create_request_tracker(request)
        return super().request_finished(request, block_ids)

    def kvprov_rebound(self, request: Any) -> None:
        """Let what is looked up and stored from now on go by the new stamp.

        A server answers lookups by the request's name. One that has asked under its former key does not ask again: it
        could take the answer to the former question for one to the new.
        """
        tracker = self.request_trackers.get(request.request_id)
        if tracker is None:
            return
        if self.lazy_offload:
            self._lazy_offload_manager.on_request_reset(request.request_id)
        if request.num_computed_tokens > 0:
            # It runs, or is being loaded: its tracker alone knows its blocks.
            self._bind(tracker, request)
            return
        adapter = self.scheduler_adapter
        if request.request_id in adapter._pending_lookups:
            self._looks_up_no_more.add(request.request_id)
            if found := adapter._finished_lookup_results.get(request.request_id, 0):
                adapter.free_lookup_locks(
                    token_ids=tracker.get_token_ids(),
                    start=0,
                    end=found,
                    request_id=request.request_id,
                    cache_salt=tracker.cache_salt,
                    request_configs=tracker.request_configs,
                )
            adapter.cleanup_lookup_result(request.request_id)
        del self.request_trackers[request.request_id]

    # The engine's self-check, in both halves.

    def kvprov_granularity(self, block_size: int) -> int:
        """Return of how many tokens the server makes a key."""
        del block_size
        return int(self.scheduler_adapter.lmcache_tokens_per_chunk)

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the keys that are looked up; and what a worker is sent to store, and to load, for each."""
        asked, stores = self._taken_through(requests, found=False)
        again, loads = self._taken_through(requests, found=True)
        lookups = [one if one == other else f"{one}|{other}" for one, other in zip(asked, again, strict=True)]
        return lookups, list(zip(stores, loads, strict=True))

    def _taken_through(self, requests: Sequence[Any], *, found: bool) -> tuple[list[str], list[Any]]:
        """Take `requests` through the connector's own steps, with a server that finds everything or nothing."""
        asked: list[str] = []
        spans = [span or 1 for span in self._group_tokens_per_block]
        with self._scheduling_apart(probe.Server(asked.append, self.kvprov_granularity(0) if found else 0)):
            for request in requests:
                matched = None
                while matched is None:
                    matched, _ = self.get_num_new_matched_tokens(request, 0)
                blocks = tuple(list(range(1 + len(request.prompt_token_ids) // span)) for span in spans)
                self.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda b=blocks: b), matched)
            output = scheduled([] if found else requests)
            metadata = self.build_connector_meta(output)
        return asked, list(metadata.requests)

    @contextmanager
    def _scheduling_apart(self, server: probe.Server) -> Iterator[None]:
        """Let the scheduler half speak to `server`, and keep nothing of it."""
        adapter = _emptied(self.scheduler_adapter)
        adapter.req_clients = dict.fromkeys(adapter._server_urls, server)
        apart = {
            "scheduler_adapter": adapter,
            "request_trackers": {},
            # An engine that only loads has the code to store as well.
            "_can_store": True,
            "lazy_offload": False,
            "_connector_stats": type(self._connector_stats)(),
        }
        kept = {name: getattr(self, name) for name in apart}
        self.__dict__.update(apart)
        try:
            yield
        finally:
            self.__dict__.update(kept)

    def kvprov_entry_key(self, entry: Any) -> str:
        """Return the key under which an entry is stored and loaded; both, if these are two."""
        keys = [self._sent_key(sent) for sent in entry]
        return keys[0] if len(set(keys)) == 1 else "|".join(keys)

    def _sent_key(self, sent: Any) -> str:
        if self._binding is not None:
            op, adapter = sent.op, self.scheduler_adapter
            return mp.spelled(adapter._create_key(op.token_ids, op.start, op.end, sent.request_id, sent.cache_salt))
        noted: list[str] = []
        adapter = _emptied(self.worker_adapter)
        adapter.create_recorded_event = lambda: None
        adapter.transfer_ctx = probe.Transfer(noted.append)
        if not adapter.is_kv_writer:
            # Of ranks that hold the same, one stores. All load.
            sent = dataclasses.replace(sent, direction="RETRIEVE")
        metadata = LMCacheMPConnectorMetadata()
        metadata.add_request_metadata(sent)
        apart = {"worker_adapter": adapter, "_connector_metadata": metadata, "dispatcher": None}
        kept = {name: getattr(self, name) for name in apart}
        self.__dict__.update(apart)
        try:
            self.start_load_kv(None)
            self.wait_for_save()
        finally:
            self.__dict__.update(kept)
        return "|".join(noted)
