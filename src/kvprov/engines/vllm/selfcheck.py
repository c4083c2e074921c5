"""Proof, at every start, that binding is in effect: through the live engine's own key code, in each process.

Probes are requests with made-up provenance. Two of equal provenance must have equal keys, whatever the names of their
adapters and their salts; two that differ in one dimension must not. What a lookup asks for must be what a store
writes and what a worker would load. Nothing is read from or written to the store.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

from kvprov.contract.descriptor import Known, Value
from kvprov.contract.digest import Digester
from kvprov.contract.dimension import Half
from kvprov.engines.vllm import worker
from kvprov.engines.vllm.binding import EngineBinding
from kvprov.engines.vllm.bound import BoundConnector
from kvprov.engines.vllm.stamp import Stamp, make_stamp, set_stamp, stamp_of
from kvprov.errors import BindingError

HASH_BYTES: Final = 32

_ADVICE = "Install a release of vLLM that this release of kvprov supports, or set KVPROV_MODE=off to run unprotected."


def _request(block_size: int, stamp: Stamp | None, salt: str | None = None, adapter: str | None = None) -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        request_id=f"kvprov-{secrets.token_hex(8)}",
        prompt_token_ids=list(range(1, 2 * block_size + 6)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=None if adapter is None else LoRARequest(adapter, 1, f"/{adapter}"),
        cache_salt=salt,
    )
    if stamp is not None:
        set_stamp(request, stamp)
    return request


def _probe_stamps(binding: EngineBinding) -> dict[str, Stamp]:
    """Return a stamp of made-up provenance, under "", and one that differs from it in each dimension, by its name."""
    token = secrets.token_hex(16)
    base: dict[Half, dict[str, Value]] = {
        half: {name: Known(f"nonce:{token}-{name}") for name in binding.registry.names(half)} for half in Half
    }

    def stamp(half: Half | None, name: str) -> Stamp:
        values = {h: dict(v) for h, v in base.items()}
        if half is not None:
            values[half][name] = Known(f"nonce:{token}-{name}-other")
        digester = Digester(binding.registry, values[Half.WORKER])
        return make_stamp(digester, values[Half.REQUEST], binding.settings.digest_bits)

    stamps = {"": stamp(None, "")}
    for half in Half:
        for name in binding.registry.names(half):
            stamps[name] = stamp(half, name)
    return stamps


def _fail(what: str) -> BindingError:
    return BindingError(f"kvprov's self-check failed: {what}. The engine does not start.", _ADVICE)


def _distinct(site: str, key: Callable[[str], Any], names: list[str]) -> None:
    """Check that the key of "" is stable, and differs from that of each dimension's probe."""
    base = key("")
    if key("") != base:
        raise _fail(f"{site} gives two keys to requests of equal provenance")
    for name in names:
        if key(name) == base:
            raise _fail(f"{site} gives one key to requests that differ in {name}")


def _check_chain(binding: EngineBinding, hasher: Callable[[Any], list[Any]], block_size: int) -> None:
    stamps = _probe_stamps(binding)
    names = [name for name in stamps if name]

    def first_hash(name: str, **facts: Any) -> bytes:
        hashes = hasher(_request(block_size, stamps[name], **facts))
        if len(hashes) != 2:
            raise _fail(f"the block hasher made {len(hashes)} hashes of two blocks")
        if len(hashes[0]) != HASH_BYTES:
            raise _fail(f"the block hasher makes hashes of {len(hashes[0])} bytes")
        return bytes(hashes[0])

    _distinct("the block-hash chain", first_hash, names)
    if first_hash("", salt="salt", adapter="adapter") != first_hash("", salt="pepper", adapter="renamed"):
        raise _fail("the block-hash chain still holds the adapter's name or the salt")


def _check_requests(binding: EngineBinding, block_size: int) -> None:
    """Check that the facts of requests reach their digests."""

    def text(salt: str | None, adapter: str) -> str:
        request = _request(block_size, None, salt=salt)
        binding.stamp(request, Known(f"nonce:{adapter}"))
        stamp = stamp_of(request)
        assert stamp is not None
        return stamp.text

    withheld = binding.settings.unsafe_withhold
    if binding.has_request_extensions:
        # Then equal requests have equal digests only if somebody else's dimension says so.
        return
    # Where a connector cannot be told to keep away from its tier, each request of an unknown worker has its own digest.
    if not binding.worker.reason and text("a", "x") != text("a", "x"):
        raise _fail("requests of equal provenance have two digests")
    if "sharing_domain" not in withheld and len({text(None, "x"), text("a", "x"), text("b", "x")}) != 3:
        raise _fail("requests of different salts have one digest")
    if "adapter" not in withheld and text("a", "x") == text("a", "y"):
        raise _fail("requests of different adapters have one digest")


def _check_connector(
    binding: EngineBinding, connector: Any, index: int, hasher: Callable[[Any], list[Any]], block_size: int
) -> None:
    name = type(connector).__name__
    if not isinstance(connector, BoundConnector):
        raise _fail(f"{name} is not a connector of kvprov's")
    stamps = _probe_stamps(binding)
    block_size = connector.kvprov_granularity(block_size)
    # The first provenance comes twice: its two requests must have one key.
    probes = [(probe, _request(block_size, stamp)) for probe, stamp in [("", stamps[""]), *stamps.items()]]
    for _, request in probes:
        request.block_hashes = hasher(request)
    lookups, entries = connector.kvprov_probe([request for _, request in probes])
    if lookups[0] != lookups[1] or not lookups[0]:
        raise _fail(f"{name}'s lookup gives two keys to requests of equal provenance")
    for (probe, _), key in zip(probes[2:], lookups[2:], strict=True):
        if key == lookups[0]:
            raise _fail(f"{name}'s lookup gives one key to requests that differ in {probe}")
    if not entries:
        return
    if [connector.kvprov_entry_key(entry) for entry in entries] != lookups:
        raise _fail(f"{name} stores under other keys than it looks up")
    for keys in binding.call_workers(worker.connector_keys, (index, entries)):
        if keys != lookups:
            raise _fail(f"{name} loads under other keys in a worker than it looks up")


def check(binding: EngineBinding, hasher: Callable[[Any], list[Any]], block_size: int) -> str:
    """Check the engine that is being started.

    Args:
        binding: Its binding.
        hasher: Its block hasher.
        block_size: How many tokens one hash covers.

    Returns:
        The name of the engine's connector, with those below it; "none" when it has none.

    Raises:
        BindingError: Binding is not in effect.
    """
    _check_requests(binding, block_size)
    _check_chain(binding, hasher, block_size)
    connector = binding.connector()
    if connector is None:
        return "none"
    if not isinstance(connector, BoundConnector):
        raise _fail(f"{type(connector).__name__} is not a connector of kvprov's")
    from kvprov.engines.vllm.multi import leaves

    below = list(leaves(connector))
    for index, leaf in enumerate(below):
        _check_connector(binding, leaf, index, hasher, binding.token_block_size())
    names = "+".join(type(leaf).__name__ for leaf in below)
    return names if below == [connector] else f"{type(connector).__name__}({names})"
