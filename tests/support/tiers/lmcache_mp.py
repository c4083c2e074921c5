"""vLLM's LMCacheMPConnector, whose server keeps its second tier in a folder or in Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.lmcache_mp import fs_keys, fs_l2, lmcache_server, redis_l2
from tests.support.redis import redis_server
from tests.support.tiers import Tier

COLLIDES = frozenset({"adapter", "weights", "precision", "model_config", "kv_representation"})
"""Native keys hold the tokens, the model's path and the raw salt."""

ARGS = {"disable_hybrid_kv_cache_manager": True}
"""Else vLLM imports the connector, to ask it, before it rebinds its kernels for the CPU, which LMCache's break."""

DIES = frozenset({"kv_representation"})
"""The load fails, and vLLM then ends the request without a token."""


@contextmanager
def _tier(folder: Path, name: str, l2: dict[str, Any], keys: Callable[[], list[str]]) -> Iterator[Tier]:
    with lmcache_server(folder / "server", l2) as server:
        yield Tier(name, server.connector(), args=ARGS, settle=1.0, collides=COLLIDES, dies=DIES, keys=keys)


@contextmanager
def fs(folder: Path) -> Iterator[Tier]:
    """A server whose second tier is a folder."""
    data = folder / "l2"
    data.mkdir(parents=True)
    with _tier(folder, "lmcache-mp-fs", fs_l2(data), lambda: fs_keys(data)) as tier:
        yield tier


@contextmanager
def redis(folder: Path) -> Iterator[Tier]:
    """A server whose second tier is a Redis server."""
    with (
        redis_server(folder / "redis") as store,
        _tier(folder, "lmcache-mp-redis", redis_l2(store), store.keys) as tier,
    ):
        yield tier
