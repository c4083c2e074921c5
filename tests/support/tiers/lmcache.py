"""LMCache's in-process form: its connector, over the stores that it brings."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from redis import Redis

from tests.support import lmcache_cpu
from tests.support.daemon import HOST, Daemon
from tests.support.ports import free_port
from tests.support.redis import RedisServer, redis_server
from tests.support.tiers import Tier

CHUNK: Final = 32
"""Tokens of an entry. LMCache's own default, 256, is longer than the prompts of most tests."""

_COLLIDES: Final = frozenset({"adapter", "sharing_domain", "weights", "precision", "model_config"})


def loadable(prompt_tokens: int) -> int:
    """Return how many tokens of a prompt LMCache loads from a warm store: whole chunks, but never the last token."""
    whole = prompt_tokens // CHUNK * CHUNK
    return whole - (whole == prompt_tokens)


def environment(**settings: str) -> dict[str, str]:
    """Return an engine's environment, with more of LMCache's settings by name."""
    return {
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.1",
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_TRACK_USAGE": "false",
        # Stock keys are made of Python's hashes, which differ from process to process without it.
        "PYTHONHASHSEED": "0",
        **{f"LMCACHE_{name.upper()}": value for name, value in settings.items()},
    }


def _tier(name: str, *, keys: Callable[[], list[str]] | None = None, **settings: str) -> Tier:
    return Tier(
        name=name,
        connector={"kv_connector": "LMCacheConnectorV1"},
        env=environment(**settings),
        before=lmcache_cpu.install,
        settle=0.5,
        collides=_COLLIDES,
        keys=keys,
    )


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def local_disk(folder: Path) -> Iterator[Tier]:
    """LMCache's memory and local disk: shared by the requests of one engine, since nothing reads the files anew."""
    entries = folder / "entries"
    entries.mkdir(parents=True)
    yield _tier(
        "lmcache-local-disk",
        keys=partial(_files, entries),
        local_cpu="True",
        local_disk=f"file://{entries}/",
        max_local_disk_size="0.5",
    )


@contextmanager
def disk(folder: Path) -> Iterator[Tier]:
    """A folder on disk as remote store, which every engine reads."""
    entries = folder / "entries"
    entries.mkdir(parents=True)
    yield _tier(
        "lmcache-disk",
        keys=partial(_files, entries),
        remote_url=f"fs://localhost:0{entries}/",
        remote_serde="naive",
    )


class LmServer(Daemon):
    """LMCache's own server, which keeps entries in its memory.

    Args:
        folder: For its log.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", HOST, str(self.port)]
        super().__init__(command, folder / "lm-server.log", self._connect, environment={"LMCACHE_TRACK_USAGE": "false"})

    def _connect(self) -> None:
        socket.create_connection((HOST, self.port), timeout=5).close()

    @property
    def url(self) -> str:
        return f"lm://{HOST}:{self.port}"

    def tier(self) -> Tier:
        return _tier("lmcache-lm", remote_url=self.url, remote_serde="naive")


@contextmanager
def lm_server(folder: Path) -> Iterator[LmServer]:
    """Run a server until the block ends."""
    with LmServer(folder) as server:
        yield server


@contextmanager
def lm(folder: Path) -> Iterator[Tier]:
    """LMCache's own server as remote store. It lists nothing."""
    with lm_server(folder) as server:
        yield server.tier()


def redis_names(port: int) -> list[str]:
    """Return the names that a Redis server lists, from any process. LMCache keeps an entry under two."""
    with Redis(host=RedisServer.host, port=port) as client:
        return sorted(name.decode() for name in client.scan_iter(count=1000))


@contextmanager
def redis(folder: Path) -> Iterator[Tier]:
    """Redis as remote store."""
    with redis_server(folder) as server:
        yield _tier(
            "lmcache-redis",
            keys=partial(redis_names, server.port),
            remote_url=f"redis://{server.host}:{server.port}",
            remote_serde="naive",
        )
