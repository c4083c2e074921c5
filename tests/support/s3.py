"""A real S3 server of a test's own: moto's, in a process of its own."""

from __future__ import annotations

import sys
import urllib.request
import xml.etree.ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.daemon import HOST, Daemon
from tests.support.ports import free_port

_NAMESPACE = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}


class S3Server(Daemon):
    """A server with one bucket. It keeps what it has in memory.

    Args:
        folder: For its log.
    """

    host = HOST
    bucket = "kvbucket"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", self.host, "-p", str(self.port)]
        super().__init__(command, folder / "s3.log", self._make_bucket)

    def _make_bucket(self) -> None:
        self._call("PUT", f"/{self.bucket}")

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

    def _call(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
        return body

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
    with S3Server(folder) as server:
        yield server
