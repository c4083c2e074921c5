"""vLLM's LMCacheConnectorV1 (LMCache within the engine's processes), bound by tag.

LMCache makes a key from a request's tokens and its tags: in the scheduler's half for a lookup, which asks the workers,
and in the workers' half to store and to load. All of them make keys by a token database, which is exchanged for a bound
one in both halves; and both halves see requests whose tags are kvprov's alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as Native

from kvprov.engines.lmcache import forms, keys
from kvprov.engines.vllm import inputs
from kvprov.engines.vllm.bound import KeepsRequests, scheduled
from kvprov.engines.vllm.stamp import stamp_of
from kvprov.errors import BindingError

_NAME = "LMCacheConnectorV1"


class _View:
    """A request, or vLLM's record of a new one, as LMCache sees it: what its client said gives way to our tag."""

    def __init__(self, request: Any, configs: Mapping[str, Any]) -> None:
        self._request = request
        self.sampling_params = SimpleNamespace(extra_args={keys.CONFIGS: dict(configs)})
        self.kv_transfer_params = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _configs(request: Any) -> dict[str, Any]:
    """Return what LMCache is handed for a request whose provenance is known."""
    stamp = stamp_of(request)
    assert stamp is not None
    media = [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features or ()]
    said = keys.client_parameters(getattr(request.sampling_params, "extra_args", None))
    return keys.request_configs(keys.tag_text(stamp.text, media), said.skip_save)


def _facts(vllm_config: Any, lmcache_config: Any, metadata: Any, database: Any) -> keys.PathFacts:
    parallel = vllm_config.parallel_config
    layers, planes, _, heads, head_size = metadata.kv_shape
    return keys.PathFacts(
        tensor_parallel=1 if database.save_only_first_rank else parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=(
            getattr(parallel, "prefill_context_parallel_size", 1),
            getattr(parallel, "decode_context_parallel_size", 1),
        ),
        layers=layers,
        planes=planes,
        heads=heads,
        head_size=head_size,
        serde=str(lmcache_config.remote_serde or "naive"),
    )


def _asker(client: Any) -> Any:
    """Return the lookup client that hashes tokens, below those that only count."""
    while hasattr(client, "actual_lookup_client"):
        client = client.actual_lookup_client
    return client


def release_lookup(worker: Any, request_id: str) -> None:
    """Let a worker forget what it found for a request, and no longer keep it from being evicted."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvprov.engines.vllm.multi import leaves

    del worker
    for connector in leaves(get_kv_transfer_group()):
        if isinstance(connector, LMCacheConnectorV1):
            connector._lmcache_engine.lmcache_engine.lookup_unpin(request_id)


class LMCacheConnectorV1(KeepsRequests, Native):  # type: ignore[misc]
    """LMCacheConnectorV1 whose keys are bound to provenance.

    Raises:
        BindingError: Binding is not in effect in this process; LMCache is configured in a form in which it would make
            keys without provenance, or did not start; or a key would not fit into its messages.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _check_configuration(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._away: set[str] = set()
        impl = self._lmcache_engine
        self._bind(vllm_config, impl)
        if self._binding is not None:
            self._check_length(impl)

    def _bind(self, vllm_config: Any, impl: Any) -> None:
        # LMCache has been imported by now, and not a moment before vLLM created the connector.
        from kvprov.engines.lmcache.tokens import BoundTokenDatabase

        holder = _asker(impl.lookup_client) if self._binding is not None else impl.lmcache_engine
        if holder is None or impl._manager._init_failed:
            reason = str(impl._manager._init_failed_reason).strip().split("\n")[-1]
            raise BindingError(
                f"LMCache did not start: {reason or 'it gives no reason'}.",
                "Correct its configuration. Without kvprov it would go on, and neither store nor load anything.",
            )
        native = holder.token_database
        self._database = BoundTokenDatabase(
            native, _facts(vllm_config, impl.config, impl.lmcache_engine_metadata, native)
        )
        holder.token_database = self._database

    def _check_length(self, impl: Any) -> None:
        from lmcache.utils import TORCH_DTYPE_TO_STR_DTYPE

        assert self._binding is not None
        metadata = impl.lmcache_engine_metadata
        text = keys.TEXT_LENGTHS[int(self._binding.settings.digest_bits)]
        found = keys.longest_key(metadata.world_size, TORCH_DTYPE_TO_STR_DTYPE[metadata.kv_dtype], text)
        if found > keys.WIRE_BYTES:
            raise BindingError(
                f"Keys of this engine have up to {found} bytes, and LMCache's messages hold {keys.WIRE_BYTES}: it "
                "would neither store nor find them.",
                "Set KVPROV_DIGEST_BITS=128, or run fewer workers in one engine.",
            )

    # Scheduler half.

    def reason_to_bypass(self, request: Any) -> str:
        """Return why `request` must not touch the tier; empty when it may."""
        return super().reason_to_bypass(request) or inputs.beyond_tokens(request)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._away.discard(request.request_id)
        return super().request_finished(_View(request, {}), block_ids)

    def _keeps_away(self, request: Any) -> bool:
        return request.request_id in self._away or bool(self.reason_to_bypass(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up the bound keys."""
        if self._keeps_away(request):
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            _View(request, _configs(request)), num_computed_tokens
        )
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a load under the bound keys."""
        if not self._keeps_away(request):
            super().update_state_after_alloc(_View(request, _configs(request)), blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Name what to load and to store by the bound keys."""
        bound = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is None or self._keeps_away(request):
                # For good: LMCache cannot take up a request halfway.
                self._away.add(new.req_id)
            else:
                bound.append(_View(new, _configs(request)))
        view = copy.copy(scheduler_output)
        view.scheduled_new_reqs = bound
        view.scheduled_cached_reqs = self._followed(scheduler_output.scheduled_cached_reqs)
        return super().build_connector_meta(view)

    def _followed(self, cached: Any) -> Any:
        """Return, of the requests that go on, those that LMCache follows."""
        trackers = self._lmcache_engine._request_trackers
        kept = [index for index, request_id in enumerate(cached.req_ids) if request_id in trackers]
        if len(kept) == len(cached.req_ids):
            return cached
        return SimpleNamespace(
            req_ids=[cached.req_ids[index] for index in kept],
            new_block_ids=[cached.new_block_ids[index] for index in kept],
            resumed_req_ids=cached.resumed_req_ids,
        )

    def kvprov_rebound(self, request: Any) -> None:
        """Forget what was found under the former keys, and store the rest under the new ones, or not at all."""
        impl, request_id = self._lmcache_engine, request.request_id
        _asker(impl.lookup_client).clear_lookup_status(request_id)
        found = impl.load_specs.pop(request_id, None)
        if found is not None and found.lmcache_cached_tokens > 0 and self._binding is not None:
            self._binding.call_workers(release_lookup, (request_id,))
        tracker = impl._request_trackers.get(request_id)
        if tracker is None:
            return
        if self.reason_to_bypass(request):
            self._away.add(request_id)
            impl._request_trackers.pop(request_id)
            impl._unfinished_requests.pop(request_id, None)
        else:
            tracker.request_configs = _configs(request)

    # Worker half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start the tier, and let it give whole entries only."""
        super().register_kv_caches(kv_caches)
        from kvprov.engines.lmcache import reads

        impl = self._lmcache_engine
        if impl.lmcache_engine.storage_manager is not None:
            whole = None if impl.config.save_unfull_chunk else int(impl.config.chunk_size)
            reads.guard(impl.lmcache_engine.storage_manager, whole)

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Return events whose hashes are bytes: they are wider than a whole number in a message."""
        events = super().get_kv_connector_kv_cache_events()
        for event in events.get_all_events() if events is not None else ():
            event.block_hashes = [_as_bytes(value) for value in event.block_hashes]
            event.parent_block_hash = _as_bytes(event.parent_block_hash)
        return events

    # The engine's self-check, in both halves.

    def kvprov_granularity(self, block_size: int) -> int:
        """Return of how many tokens LMCache makes a key."""
        return max(block_size, int(self._lmcache_engine.config.chunk_size))

    def _spell(self, found: Any) -> str:
        """Return what keys say of tokens and provenance: not of the rank, by which alone workers differ."""
        return "|".join(f"{key.model_name}@{key.chunk_hash_hex}@{key.tags}" for _, _, key in found)

    def _asked(self, request: Any) -> tuple[Any, Any, Any]:
        """Return what the workers would be asked for: hashes, their numbers of tokens, and the request's tags."""
        impl = self._lmcache_engine
        transport = _asker(impl.lookup_client).transport
        asked: list[Any] = []

        def record(message: list[Any]) -> list[bytes]:
            asked.append(message)
            return [bytes(4)] * transport.world_size

        transport.__dict__["send_and_recv_all"] = record
        try:
            self.get_num_new_matched_tokens(request, 0)
        finally:
            del transport.__dict__["send_and_recv_all"]
            _asker(impl.lookup_client).clear_lookup_status(request.request_id)
            impl.load_specs.pop(request.request_id, None)
            impl._requests_priority.pop(request.request_id, None)
        hashes, offsets, _, configs = asked[0]
        return hashes, offsets, configs

    def _looked_up(self, asked: tuple[Any, Any, Any]) -> str:
        import json

        hashes, offsets, configs = asked
        found = self._database.process_tokens(hashes=hashes, offsets=offsets, request_configs=json.loads(configs))
        return self._spell(found)

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the keys that are looked up; and what workers are asked for and sent for them."""
        asked = [self._asked(request) for request in requests]
        impl = self._lmcache_engine
        kept = self._requests, self._away, impl._request_trackers
        self._requests = {request.request_id: request for request in requests}
        self._away, impl._request_trackers = set(), {}
        try:
            metadata = self.build_connector_meta(scheduled(requests))
        finally:
            self._requests, self._away, impl._request_trackers = kept
        entries = [(a, m.token_ids, m.request_configs) for a, m in zip(asked, metadata.requests, strict=True)]
        return [self._looked_up(a) for a in asked], entries

    def kvprov_entry_key(self, entry: Any) -> str:
        """Return the key under which one request's first chunks are stored, loaded and looked up in this process."""
        asked, token_ids, configs = entry
        stored = self._spell(self._database.process_tokens(tokens=token_ids, request_configs=configs))
        looked_up = self._looked_up(asked)
        return stored if looked_up == stored else f"looked up as {looked_up}, stored as {stored}"


def _as_bytes(value: Any) -> Any:
    return value.to_bytes(32, "big") if isinstance(value, int) and value else value


def _check_configuration(vllm_config: Any) -> None:
    """Check LMCache's configuration before anything of it starts.

    Raises:
        BindingError: It makes keys without provenance.
    """
    if vllm_config.kv_transfer_config.get_from_extra_config("use_native", False):
        raise BindingError(
            f"{_NAME} is configured with use_native, which takes vLLM's older copy of the connector. kvprov does not "
            "bind that one.",
            "Leave use_native out of kv_connector_extra_config, or set KVPROV_MODE=off to run without any protection.",
        )
    from lmcache.integration.vllm.utils import lmcache_get_or_create_config
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    config = lmcache_get_or_create_config()
    # LMCache does this itself a moment later, to the same object; but then it starts what is configured.
    LMCacheConnectorV1Impl._apply_extra_config(None, config, vllm_config)
    forms.check(config, _NAME)
