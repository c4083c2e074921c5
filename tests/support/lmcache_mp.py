"""A real LMCache server, in a process of its own, as engines share it."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.daemon import HOST, Daemon
from tests.support.models import BLOCK
from tests.support.ports import free_port
from tests.support.redis import RedisServer


@dataclass(frozen=True)
class Http:
    """The HTTP interface of a server."""

    port: int

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call it, and return what it answers.

        Raises:
            urllib.error.HTTPError: It refuses.
        """
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def prefetch(self, body: dict[str, Any]) -> int:
        """Let the server prefetch from its second tier, and return how many entries it found."""
        job = self.call("POST", "/cache/prefetches", body)["request_id"]
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            status = self.call("GET", f"/cache/prefetches/{job}")
            if status["status"] == "completed":
                return int(status["found_keys"])
            time.sleep(0.05)
        raise RuntimeError(f"the prefetch did not end: {status}")

    def delete(self, keys: list[dict[str, Any]]) -> int:
        """Delete entries from both tiers, and return of how many the server says so."""
        return int(self.call("DELETE", "/cache/objects", {"keys": keys, "tier": "all"})["deleted"])


class LMCacheServer(Daemon):
    """A server with a first tier in its memory, empty at each start, and a second one elsewhere, which outlives it.

    Args:
        folder: For its log.
        l2: What its second tier is, as its command line takes it.
        options: More options of its command line.
    """

    def __init__(self, folder: Path, l2: dict[str, Any], *options: str) -> None:
        self.port, self.http = free_port(), Http(free_port())
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", HOST, "--port", str(self.port)),
            *("--http-host", HOST, "--http-port", str(self.http.port), "--chunk-size", str(BLOCK)),
            *("--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
            *("--disable-observability", "--l2-adapter", json.dumps(l2), *options),
        ]
        super().__init__(
            command,
            folder / "lmcache.log",
            partial(self.http.call, "GET", "/quota"),
            environment={"LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"},
        )

    def connector(self, **extra: Any) -> dict[str, Any]:
        """Return the members of an engine's KV transfer configuration."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": self.port,
                "lmcache.mp.heartbeat_interval": 1.0,
                "lmcache.mp.mq_timeout": 20.0,
                **extra,
            },
        }


def fs_l2(folder: Path) -> dict[str, Any]:
    """Return a second tier that is a folder."""
    return {"type": "fs", "base_path": str(folder)}


def redis_l2(server: RedisServer) -> dict[str, Any]:
    """Return a second tier that is a Redis server."""
    return {"type": "resp", "host": server.host, "port": server.port, "num_workers": 2}


def fs_keys(folder: Path) -> list[str]:
    """Return the names of all entries of a second tier that is a folder."""
    return sorted(file.stem for file in folder.glob("**/*.data"))


def encoded(name: str) -> dict[str, Any]:
    """Return the name of an entry of a second tier as the HTTP interface takes it."""
    model, rank, group, chunk, *salt = name.split("@")
    return {
        "model_name": model,
        "kv_rank": int(rank, 16),
        "object_group_id": int(group, 16),
        "chunk_hash_hex": chunk,
        "cache_salt": "".join(salt),
    }


@contextmanager
def lmcache_server(folder: Path, l2: dict[str, Any], *options: str) -> Iterator[LMCacheServer]:
    """Run a server until the block ends."""
    with LMCacheServer(folder, l2, *options) as server:
        yield server
