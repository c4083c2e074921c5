"""Where each connector's own code hands keys to its store: there, and no earlier, they are read.

What stands behind that place (a socket, a server, a transfer library) is replaced; nothing before it is. The same taps
read stock connectors and bound ones, which are subclasses of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from kvprov.check.audit.vllm.world import BLOCK, PROMPT_TOKENS, TAG, Noticed
from kvprov.engines.lmcache.probe import Answer

BLOCKS: Final = PROMPT_TOKENS // BLOCK


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Let `owner` have another attribute meanwhile; gives what it had."""
    kept = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, value)
    try:
        yield kept
    finally:
        if own:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)


def _look_up(connector: Any, request: Any) -> None:
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)


def example(connector: Any, request: Any) -> list[str]:
    """ExampleConnector: the folder of a prompt."""
    asked: list[str] = []
    native = connector._generate_foldername_debug

    def noted(*args: Any, **kwargs: Any) -> str:
        asked.append(native(*args, **kwargs))
        return asked[-1]

    with _replaced(connector, "_generate_foldername_debug", noted):
        _look_up(connector, request)
    return [name.rpartition("/")[2] for name in asked[:1]]


def prepare_hf3fs() -> None:
    """Let HF3FSKVConnector be made without its metadata server."""
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs import hf3fs_connector

    class Client:
        def initialize(self, *_args: Any, **_kwargs: Any) -> None:
            """There is nothing to reach."""

        def close(self) -> None:
            """There is nothing to close."""

    hf3fs_connector.Hf3fsMetadataClient = Client
    # It would take over the signals that end this process.
    hf3fs_connector.signal = SimpleNamespace(signal=lambda *_args: None, SIGINT=0, SIGTERM=0, SIGQUIT=0)


def hf3fs(connector: Any, request: Any) -> list[str]:
    """HF3FSKVConnector: what its metadata server is asked for."""
    asked: list[str] = []

    def exist(keys: list[str]) -> list[bool]:
        asked.extend(keys)
        return [False] * len(keys)

    client = SimpleNamespace(batch_key_exists=exist, close=lambda: None)
    with _replaced(connector, "_metadata_client", client):
        _look_up(connector, request)
    return asked


def simple_offload(connector: Any, request: Any) -> list[str]:
    """SimpleCPUOffloadConnector: the hashes under which it looks for blocks in host memory."""
    asked: list[str] = []
    pool = connector.scheduler_manager.cpu_block_pool

    def cached(block_hash: Any, group_ids: Sequence[int]) -> list[Any]:
        asked.append(bytes(block_hash).hex())
        # Found, so that the next is looked for, too; and nothing that would have to be kept.
        return [pool.null_block] * len(group_ids)

    with _replaced(pool, "get_cached_block", cached):
        _look_up(connector, request)
    return asked


def offload(spell: Callable[[Any, Any], str]) -> Callable[[Any, Any], list[str]]:
    """Return the tap of OffloadingConnector over one tier.

    Args:
        spell: Returns the tier's key, given the tier and the connector's key of a block.
    """

    def tap(connector: Any, request: Any) -> list[str]:
        from vllm.v1.kv_offload.base import LookupResult

        (tier,) = connector.scheduler.manager.secondary_tiers
        asked: list[str] = []

        def lookup(key: Any, _context: Any) -> Any:
            asked.append(spell(tier, key))
            return LookupResult.RETRY

        with _replaced(tier, "lookup", lookup):
            _look_up(connector, request)
        return asked

    return tap


def file_key(tier: Any, key: Any) -> str:
    """The name of a block's file, below the tier's folder."""
    name = str(tier.file_mapper.get_file_name(key))
    return name.removeprefix(str(getattr(tier, "_audit_root", "")))


def object_key(tier: Any, key: Any) -> str:
    """The name of a block's object."""
    return str(tier._file_mapper.get_file_name(key))


def peer_key(tier: Any, key: Any) -> str:
    """A block's key as a peer is asked for it, and the fingerprint by which the two refuse each other."""
    return f"{tier._data.config_fingerprint}@{bytes(key).hex()}"


def plain_key(_tier: Any, key: Any) -> str:
    """A block's key, as the connector gives it to a tier that has no names of its own."""
    return bytes(key).hex()


def prepare_obj() -> None:
    """Let the obj tier be made without an object store."""
    from vllm.v1.kv_offload.tiering.obj import manager

    class Agent:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_args, **_kwargs: [None]

    manager.nixl_agent = lambda *_args, **_kwargs: Agent()
    manager.nixl_agent_config = lambda *_args, **_kwargs: None


def prepare_p2p() -> None:
    """Let the p2p tier be made without peers."""
    from vllm.v1.kv_offload.tiering.p2p import manager
    from vllm.v1.kv_offload.tiering.p2p.data import nixl

    class Control:
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            """There is nobody to talk to."""

        def __getattr__(self, _name: str) -> Any:
            return lambda *_args, **_kwargs: []

    manager.ZmqTransport = Control
    nixl._NixlAgent = None


def mooncake(worker_of: Callable[[Any], Any]) -> Callable[[Any, Any], list[str]]:
    """Return the tap of MooncakeStoreConnector: what the store is asked for.

    Args:
        worker_of: Returns the worker half that answers a connector's lookups.
    """

    def tap(connector: Any, request: Any) -> list[str]:
        worker = worker_of(connector)
        asked: list[str] = []

        def exist(keys: list[str]) -> list[int]:
            asked.extend(keys)
            return [0] * len(keys)

        def lookup(_request_id: str, tokens: int, hashes: Any, *_args: Any, **_kwargs: Any) -> Any:
            return worker.lookup(tokens, hashes)

        with (
            _replaced(worker, "store", SimpleNamespace(batch_is_exist=exist)),
            _replaced(connector.connector_scheduler.client, "lookup", lookup),
        ):
            _look_up(connector, request)
        return asked

    return tap


def lmcache(connector: Any, request: Any) -> list[str]:
    """LMCacheConnectorV1: the keys that workers make of what a lookup sends them."""
    impl = connector._lmcache_engine
    client = impl.lookup_client
    while hasattr(client, "actual_lookup_client"):
        client = client.actual_lookup_client
    sent: list[Any] = []

    def send(message: list[Any]) -> list[bytes]:
        sent.append(message)
        return [bytes(4)] * client.transport.world_size

    with _replaced(client.transport, "send_and_recv_all", send):
        _look_up(connector, request)
    hashes, offsets, _, configs = sent[0]
    made = client.token_database.process_tokens(
        hashes=hashes, offsets=offsets, request_configs=json.loads(configs) if configs else None
    )
    return [key.to_string() for _, _, key in made]


class _Server:
    """Answers for an LMCache server that holds nothing, and keeps the keys that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def get_chunk_size(self) -> Answer:
        return Answer(BLOCK)

    def lookup(self, key: Any, *_args: Any) -> Answer:
        self.asked.append(key)
        return Answer(None)

    def query_prefetch_status(self, *_args: Any) -> Answer:
        return Answer(0)

    def close(self) -> None:
        """There is nothing to close."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: Answer(None)


def prepare_lmcache_mp() -> None:
    """Let LMCacheMPConnector be made without its server."""
    from lmcache.integration.vllm import vllm_multi_process_adapter as adapter

    adapter.RequestClientFactory = SimpleNamespace(create=lambda *_args, **_kwargs: _Server())


def lmcache_mp(connector: Any, request: Any) -> list[str]:
    """LMCacheMPConnector: the names of the files that the server makes of the keys that it is sent."""
    from lmcache.v1.distributed.api import ipc_key_to_object_keys
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    adapter = connector.scheduler_adapter
    adapter._ensure_heartbeat_started = lambda: None
    (server,) = adapter.req_clients.values()
    server.asked.clear()
    _look_up(connector, request)
    key = server.asked[0]
    if isinstance(request.kv_transfer_params, Noticed):
        # The connector looks through all that a client says. What counts is what it sends on.
        request.kv_transfer_params.read = TAG in (key.request_configs or {})
    hasher = TokenHasher(BLOCK)
    hashes = [hasher.hash_to_bytes(value) for value in hasher.compute_chunk_hashes(list(key.token_ids[: key.end]))]
    (keys,) = ipc_key_to_object_keys(key, hashes, [0])
    return [_object_key_to_filename(made) for made in keys]


def prepare_mooncake() -> None:
    """Let MooncakeStoreConnector's worker half be made without a store and without ranks."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    worker.get_tensor_model_parallel_rank = lambda: 0
    worker.get_tensor_model_parallel_world_size = lambda: 1
    worker.get_pcp_group = worker.get_dcp_group = lambda: alone
    worker.setup_mooncake_store = lambda *_args, **_kwargs: None
    worker.LookupKeyServer = lambda *_args, **_kwargs: None
    worker.get_ip = lambda: "127.0.0.1"
    worker.rdma_utils = SimpleNamespace(
        get_requester_local_hostname=lambda *_args: "audit", get_configured_preferred_segment=lambda *_args: None
    )


def mooncake_worker(connector: Any) -> Any:
    """Return the worker half that belongs to a scheduler half of MooncakeStoreConnector; made once."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    made = vars(connector).get("_audit_worker")
    if made is None:
        made = connector._audit_worker = MooncakeStoreWorker(connector._vllm_config, connector._kv_cache_config)
    return made
