"""A real Redis server of a test's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.daemon import HOST, Daemon
from tests.support.ports import free_port


class RedisServer(Daemon):
    """A server that keeps its data in a folder, through restarts.

    Args:
        folder: For its data and its log.
    """

    host = HOST

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.client = Redis(host=self.host, port=self.port)
        program = shutil.which("redis-server")
        assert program is not None, "redis-server is not installed"
        # Every write is in the log before it is answered, so a kill loses nothing: what is lost is the tests' choice.
        command = [
            *(program, "--bind", self.host, "--port", str(self.port), "--dir", str(folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
        ]
        super().__init__(command, folder / "redis.log", self._ping)

    def _ping(self) -> None:
        try:
            self.client.ping()
        except RedisConnectionError as error:
            raise ConnectionError from error

    def keys(self) -> list[str]:
        """Return the names of all entries."""
        return sorted(key.decode(errors="surrogateescape") for key in self.client.scan_iter(count=1000))


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """Run a server until the block ends."""
    server = RedisServer(folder)
    with server:
        yield server
    server.client.close()
