"""A real Mooncake store of a test's own: its master, and a client in a process of its own that holds the data.

Mooncake's metadata server and some of its other listeners take every interface, whatever they are told. What can be
bound to the loopback address is, and all ports are free ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.ports import free_port

_MODULES = {"mooncake_master": "mooncake.cli", "mooncake_client": "mooncake.cli_client"}


class MooncakeServer:
    """A store that outlives the engines that use it.

    Args:
        folder: For its configuration and its logs.
    """

    host = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._rpc, self._metrics, self._metadata, self._client = (free_port() for _ in range(4))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def configuration(self) -> Path:
        """The file that engines are told of by `MOONCAKE_CONFIG_PATH`."""
        return self.folder / "mooncake.json"

    def start(self) -> None:
        """Start master and client.

        Raises:
            RuntimeError: They did not come up.
        """
        master, metadata = f"{self.host}:{self._rpc}", f"http://{self.host}:{self._metadata}/metadata"
        settings = {
            "metadata_server": metadata,
            "master_server_address": master,
            "protocol": "tcp",
            "device_name": "",
            "mode": "standalone-store",
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,
        }
        self.configuration.write_text(json.dumps(settings))
        self._run(
            "mooncake_master",
            f"--rpc_address={self.host}",
            f"--rpc_port={self._rpc}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self._metrics}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_host={self.host}",
            f"--http_metadata_server_port={self._metadata}",
        )
        self._wait("the master", self.keys)
        self._run(
            "mooncake_client",
            f"--host={self.host}",
            f"--port={self._client}",
            f"--master_server_address={master}",
            f"--metadata_server={metadata}",
            "--protocol=tcp",
            "--global_segment_size=256 MB",
        )
        self._wait("the client", self._segments)

    def _run(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                [sys.executable, "-m", _MODULES[program], *arguments], stdout=log, stderr=log
            )

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self._metrics}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def _segments(self) -> list[str]:
        names = self._get("/get_all_segments").split()
        if not names:
            raise OSError("no client has mounted a segment yet")
        return names

    def _wait(self, what: str, ready: Callable[[], object], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and all(p.poll() is None for p in self._processes.values()):
            try:
                ready()
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
            else:
                return
        logs = "\n".join(f.read_text(errors="replace")[-2000:] for f in sorted(self.folder.glob("*.log")))
        raise RuntimeError(f"{what} did not come up\n{logs}")

    def kill_from_elsewhere(self, program: str) -> Callable[[], None]:
        """Return what another process may call to end one of its processes as a crash would."""
        return partial(os.kill, self._processes[program].pid, signal.SIGKILL)

    def kill(self, *programs: str) -> None:
        """End some of its processes, or all, as a crash would."""
        for program in programs or list(self._processes):
            process = self._processes.pop(program, None)
            if process is not None:
                process.kill()
                process.wait()

    def keys(self) -> list[str]:
        """Return the names of all entries."""
        return sorted(self._get("/get_all_keys").split())


@contextmanager
def mooncake_server(folder: Path) -> Iterator[MooncakeServer]:
    """Run a store until the block ends."""
    server = MooncakeServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
