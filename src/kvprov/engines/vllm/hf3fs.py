"""vLLM's HF3FSKVConnector, whose keys are hashes of token blocks, each over the one before.

vLLM (0.32) takes MD5 for them, and tokens alone. Here SHA-256 takes its place, since tenants choose tokens, and the
chain starts from the digest. The scheduler half hashes at lookup; the worker half hashes again at load and store, from
the metadata that it is sent, which therefore carries the chain's start.

What else is here keeps foreign state out of bound entries, and out of requests that load them:

- Pages of one size have a folder of their own. vLLM numbers the pages of all engines in one sequence and puts them into
  one file, where those of an engine with larger pages lie across those of others.
- A request that was preempted stores and loads nothing any more: vLLM would store blocks under each other's keys. What
  it has in flight is stored before its blocks are given away.
- Blocks that could not be loaded are reported. vLLM would compute with what the blocks happened to hold.
- Blocks of a request that ends while it loads are given away when the load has ended.
"""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_connector import HF3FSKVConnector as Native
from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.utils.common import HF3FSConnectorMetadata

from kvprov.engines.vllm import inputs
from kvprov.engines.vllm.bound import KeepsRequests, scheduled
from kvprov.engines.vllm.stamp import stamp_of
from kvprov.errors import BindingError

_START: Final = "kvprov_start"
"""Attribute of the metadata of one request: what its chain of hashes starts from."""


class _Metadata(HF3FSConnectorMetadata):  # type: ignore[misc]
    """What the worker half is told, with the requests that were preempted."""

    def __init__(self, requests: list[Any], preempted: frozenset[str]) -> None:
        super().__init__()
        self.requests = requests
        self.preempted = preempted


def _check_shape(parallel_config: Any) -> None:
    """Check that a tensor-parallel rank says which worker an entry is of.

    Raises:
        BindingError: Workers of one rank would overwrite each other's entries.
    """
    if parallel_config.world_size != parallel_config.tensor_parallel_size:
        raise BindingError(
            f"HF3FSKVConnector tells workers apart by tensor-parallel rank, and this engine has "
            f"{parallel_config.world_size} workers and {parallel_config.tensor_parallel_size} such ranks: in vLLM, "
            "the others overwrite one file.",
            "Run it without pipeline and context parallelism, or use another connector.",
        )
    if getattr(parallel_config, "decode_context_parallel_size", 1) > 1:
        raise BindingError(
            "HF3FSKVConnector stores blocks as if each rank held all of their tokens, which is not so with decode "
            "context parallelism.",
            "Run it without, or use another connector.",
        )


class HF3FSKVConnector(KeepsRequests, Native):  # type: ignore[misc]
    """HF3FSKVConnector whose keys are bound to provenance.

    Raises:
        BindingError: Binding is not in effect in this process, or the parallel shape is one that keys do not tell.
    """

    # vLLM's own, which these methods exchange.
    _connector_metadata: Any
    _metadata_client: Any
    _scheduling_states: dict[str, Any]
    _storage_path: str

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _check_shape(vllm_config.parallel_config)
        super().__init__(vllm_config, role, kv_cache_config)
        # Ranks hold a share of the heads each, so entries of other shapes are others.
        self._shape = f"tp={vllm_config.parallel_config.tensor_parallel_size}"
        self._start = ""
        self._barred: set[str] = set()
        self._loads_no_more: set[str] = set()
        self._loads: list[tuple[concurrent.futures.Future[bool], list[int]]] = []

    # Keys, in both halves.

    @contextmanager
    def _starting_from(self, start: str) -> Iterator[None]:
        """Let the hashes made meanwhile be of chains that start from `start`."""
        self._start = start
        try:
            yield
        finally:
            self._start = ""

    def _start_of(self, request: Any) -> str:
        stamp = stamp_of(request)
        assert stamp is not None
        # vLLM's keys know nothing of media. Here all of a request's are in all of its keys.
        media = ",".join(inputs.located(feature) for feature in request.mm_features)
        return f"{stamp.identifier};{self._shape};{media}"

    def _compute_prefix_hash(self, token_ids: list[int], previous_hash: str = "") -> str:
        """Hash a block of tokens and what comes before it: the block before, or the start of the chain."""
        previous = previous_hash or self._start
        if not previous:
            raise BindingError(
                "A key was asked for that belongs to no request.",
                "Report this: kvprov does not know the place in vLLM that asks.",
            )
        tokens = ",".join(map(str, token_ids))
        return hashlib.sha256(f"{previous}|{tokens}".encode()).hexdigest()

    # Scheduler half.

    def reason_to_bypass(self, request: Any) -> str:
        """Return why `request` must not touch the tier; empty when it may."""
        return super().reason_to_bypass(request) or inputs.beyond_tokens(request)

    def _stays_out(self, request: Any) -> bool:
        return bool(self.reason_to_bypass(request)) or request.num_preemptions > 0 or request.request_id in self._barred

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """Forget the request."""
        self._barred.discard(request.request_id)
        self._loads_no_more.discard(request.request_id)
        return super().request_finished(request, block_ids)

    def kvprov_rebound(self, request: Any) -> None:
        """Forget what was found under the former key. What was loaded under it must not be stored under another."""
        state = self._scheduling_states.pop(request.request_id, None)
        if state is not None and state.phase != "NEW":
            self._barred.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Look up the bound keys."""
        if self._stays_out(request):
            return 0, False
        state = self._scheduling_states.get(request.request_id)
        if state is not None and state.phase == "ACTIVE":
            # It has loaded, and is back: the load failed, and would again. What is computed now may be stored.
            del self._scheduling_states[request.request_id]
            self._loads_no_more.add(request.request_id)
        if request.request_id in self._loads_no_more:
            return 0, False
        with self._starting_from(self._start_of(request)):
            matched, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a load under the bound keys."""
        if not self._stays_out(request):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Name blocks to load and to store by the bound keys."""
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            self._scheduling_states.pop(request_id, None)

        def takes_part(request_id: str) -> bool:
            request = self._requests.get(request_id)
            return request is not None and not self._stays_out(request)

        cached = scheduler_output.scheduled_cached_reqs
        # A request without a state was barred or preempted, or came back: vLLM would make it one that begins here.
        kept = [i for i, r in enumerate(cached.req_ids) if takes_part(r) and r in self._scheduling_states]
        view = copy.copy(scheduler_output)
        view.scheduled_new_reqs = [new for new in scheduler_output.scheduled_new_reqs if takes_part(new.req_id)]
        view.scheduled_cached_reqs = SimpleNamespace(
            req_ids=[cached.req_ids[i] for i in kept], new_block_ids=[cached.new_block_ids[i] for i in kept]
        )
        requests = []
        for entry in super().build_connector_meta(view).requests:
            # vLLM's lists go on growing while the worker half, in this process or another, reads them.
            told = copy.copy(entry)
            told.token_ids, told.block_ids = list(entry.token_ids), list(entry.block_ids)
            setattr(told, _START, self._start_of(self._requests[entry.request_id]))
            requests.append(told)
        return _Metadata(requests, preempted)

    # Worker half.

    def _setup_storage_clients(self) -> None:
        """Open the file of pages of this size."""
        self._storage_path = str(Path(self._storage_path) / f"pages-of-{self._bytes_per_page}-bytes")
        super()._setup_storage_clients()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Begin to follow loads, too."""
        super().register_kv_caches(kv_caches)
        manager = self._async_manager
        submit = manager.submit_load_operation

        def following(request_id: str, block_ids: list[int], block_hashes: list[str]) -> Any:
            future = submit(request_id, block_ids, block_hashes)
            self._loads.append((future, block_ids))
            return future

        manager.submit_load_operation = following

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load has failed since the last call. vLLM calls this after `get_finished`."""
        ended = [load for load in self._loads if load[0].done()]
        self._loads = [load for load in self._loads if load not in ended]
        return {block for future, blocks in ended if not future.result() for block in blocks}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Leave out requests that ended while they load: the end of the load is reported, and frees their blocks."""
        loading = self._async_manager._load_futures.keys()
        saved, loaded = super().get_finished(finished_req_ids - loading)
        return saved, loaded

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait for what preempted requests have in flight, before others overwrite their blocks."""
        super().handle_preemptions(kv_connector_metadata)
        saves = self._async_manager._save_futures
        for request_id in sorted(kv_connector_metadata.preempted):
            concurrent.futures.wait(saves.get(request_id, ()))

    @contextmanager
    def _told_of(self, entry: Any) -> Iterator[None]:
        """Show the worker half the metadata of one request, and let it make that one's keys."""
        whole = self._connector_metadata
        self._connector_metadata = _Metadata([entry], frozenset())
        try:
            with self._starting_from(getattr(entry, _START)):
                yield
        finally:
            self._connector_metadata = whole

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load under the bound keys."""
        for entry in self._get_connector_metadata().requests:
            with self._told_of(entry):
                super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Store under the bound keys."""
        for entry in self._get_connector_metadata().requests:
            with self._told_of(entry):
                super().wait_for_save()

    # The engine's self-check, in both halves.

    def _lookup_keys(self, request: Any) -> str:
        asked: list[str] = []
        client = self._metadata_client

        def exist(keys: list[str]) -> list[bool]:
            asked.extend(keys)
            return [False] * len(keys)

        self._metadata_client = SimpleNamespace(batch_key_exists=exist)
        try:
            self.get_num_new_matched_tokens(request, 0)
        finally:
            self._metadata_client = client
        return "|".join(asked)

    def kvprov_probe(self, requests: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """Return the keys that are looked up, and the metadata that a worker is sent to store the same blocks."""
        kept = self._scheduling_states, self._requests
        self._scheduling_states, self._requests = {}, {request.request_id: request for request in requests}
        try:
            lookups = [self._lookup_keys(request) for request in requests]
            metadata = self.build_connector_meta(scheduled(requests))
        finally:
            self._scheduling_states, self._requests = kept
        return lookups, list(metadata.requests)

    def kvprov_entry_key(self, entry: Any) -> str:
        """Return the keys under which the blocks of one entry of the metadata are loaded or stored."""
        with self._starting_from(getattr(entry, _START)):
            return "|".join(self._generate_block_hashes(entry.token_ids, 0))
