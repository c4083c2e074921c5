"""A real S3 server of a test's own: moto's, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.ports import free_port

_NAMESPACE = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}


class S3Server:
    """A server with one bucket. It keeps what it has in memory.

    Args:
        folder: For its log.
    """

    host = "127.0.0.1"
    bucket = "kvbucket"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "s3.log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def store_config(self) -> dict[str, str]:
        """Return how vLLM's object tier is told of it."""
        return {
            "bucket": self.bucket,
            "endpoint_override": self.url,
            "access_key": "access",
            "secret_key": "secret",
            "region": "us-east-1",
            "scheme": "http",
        }

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: It did not come up.
        """
        command = [sys.executable, "-m", "moto.server", "-H", self.host, "-p", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._call("PUT", f"/{self.bucket}")
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"the S3 server did not come up\n{self.log.read_text(errors='replace')[-2000:]}")

    def _call(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
        return body

    def kill_from_elsewhere(self) -> Callable[[], None]:
        """Return what another process may call to end it as a crash would."""
        assert self._process is not None
        return partial(os.kill, self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def keys(self) -> list[str]:
        """Return the names of all objects."""
        found: list[str] = []
        token = ""
        while True:
            answer = self._call("GET", f"/{self.bucket}?list-type=2{token}")
            root = xml.etree.ElementTree.fromstring(answer)
            found += [str(element.text) for element in root.iterfind("s3:Contents/s3:Key", _NAMESPACE)]
            following = root.find("s3:NextContinuationToken", _NAMESPACE)
            if following is None:
                return sorted(found)
            token = f"&continuation-token={following.text}"


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server until the block ends."""
    server = S3Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
