"""A real LMCache server, in a process of its own, as engines share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import BLOCK
from tests.support.ports import free_port
from tests.support.redis import RedisServer

HOST = "127.0.0.1"


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


class LMCacheServer:
    """A server with a first tier in its memory and a second one elsewhere, which outlives it.

    Args:
        folder: For its log.
        l2: What its second tier is, as its command line takes it.
        options: More options of its command line.
    """

    def __init__(self, folder: Path, l2: dict[str, Any], *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "lmcache.log"
        self.port, self.http = free_port(), Http(free_port())
        self._command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", HOST, "--port", str(self.port)),
            *("--http-host", HOST, "--http-port", str(self.http.port), "--chunk-size", str(BLOCK)),
            *("--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
            *("--disable-observability", "--l2-adapter", json.dumps(l2), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with an empty first tier.

        Raises:
            RuntimeError: It did not come up.
        """
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.http.call("GET", "/quota")
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"the LMCache server did not come up\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """End it as a crash would, and start it on the same ports. Only its second tier is left."""
        self.kill()
        self.start()

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
    server = LMCacheServer(folder, l2, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
