"""A real Redis server of a test's own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.ports import free_port


class RedisServer:
    """A server that keeps its data in a folder.

    Args:
        folder: For its data and its log.
    """

    host = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.client = Redis(host=self.host, port=self.port)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with what it had saved.

        Raises:
            RuntimeError: It did not come up.
        """
        program = shutil.which("redis-server")
        assert program is not None, "redis-server is not installed"
        # Every write is in the log before it is answered, so a kill loses nothing: what is lost is the tests' choice.
        command = [
            *(program, "--bind", self.host, "--port", str(self.port), "--dir", str(self.folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
        ]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.client.ping()
            except RedisConnectionError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"redis did not come up\n{(self.folder / 'redis.log').read_text()[-2000:]}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """End it as a crash would, and start it on the same port with the same data."""
        self.kill()
        self.start()

    def keys(self) -> list[str]:
        """Return the names of all entries."""
        return sorted(key.decode(errors="surrogateescape") for key in self.client.scan_iter(count=1000))


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """Run a server until the block ends."""
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.client.close()
        server.kill()
