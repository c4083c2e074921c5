"""Digests of descriptors, with the worker half hashed once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from kvprov.contract.descriptor import Descriptor, Value
from kvprov.contract.dimension import Half
from kvprov.contract.encoding import ENCODING, WORKER_ENCODING, check_half, encode, encode_half, lp
from kvprov.contract.registry import Registry

DIGEST_BYTES: Final = 32
REMEMBERED_DIGESTS: Final = 4096
"""How many request halves a `Digester` remembers: bounded, since tenants choose salts freely."""


def digest(registry: Registry, descriptor: Descriptor) -> bytes:
    """Return the digest of `descriptor`: 32 bytes of SHA-256 over its encoding.

    Raises:
        ContractError: see `encode_half`.
    """
    return hashlib.sha256(encode(registry, descriptor)).digest()


def worker_digest(registry: Registry, worker: Mapping[str, Value]) -> bytes:
    """Return the digest of a worker half alone: 32 bytes, for logs and for fixed-length model fields.

    Raises:
        ContractError: see `encode_half`.
    """
    return hashlib.sha256(lp(WORKER_ENCODING) + encode_half(registry, Half.WORKER, worker)).digest()


class Digester:
    """Digests of one worker's requests: equal to `digest`, with the worker half encoded and hashed once.

    Safe to use from several threads. Memory is bounded whatever the requests carry.

    Args:
        registry: The declared dimensions.
        worker: The worker half.

    Raises:
        ContractError: see `encode_half`.
    """

    def __init__(self, registry: Registry, worker: Mapping[str, Value]) -> None:
        self.registry = registry
        self.worker = dict(worker)
        self.worker_digest = worker_digest(registry, worker)
        self._state = hashlib.sha256(lp(ENCODING) + encode_half(registry, Half.WORKER, worker))
        self._digest = lru_cache(maxsize=REMEMBERED_DIGESTS)(self._compute)

    def digest(self, request: Mapping[str, Value]) -> bytes:
        """Return the digest of this worker's half together with `request`, 32 bytes.

        Raises:
            ContractError: see `encode_half`.
        """
        names = self.registry.request
        if len(request) != len(names) or any(name not in request for name in names):
            check_half(self.registry, Half.REQUEST, request)
        return self._digest(tuple(request[name] for name in names))

    def _compute(self, values: tuple[Value, ...]) -> bytes:
        state = self._state.copy()
        state.update(encode_half(self.registry, Half.REQUEST, dict(zip(self.registry.request, values, strict=True))))
        return state.digest()
