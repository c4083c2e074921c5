"""A real Mooncake store of a test's own: its master, and a client in a process of its own that holds the data.

Mooncake's metadata server and some of its other listeners take every interface, whatever they are told. What can be
bound to the loopback address is, and all ports are free ones.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.daemon import HOST, Daemon
from tests.support.ports import free_port

_MODULES = {"mooncake_master": "mooncake.cli", "mooncake_client": "mooncake.cli_client"}


class MooncakeServer:
    """A store that outlives the engines that use it.

    Args:
        folder: For its configuration and its logs.
    """

    host = HOST

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._rpc, self._metrics, self._metadata, self._client = (free_port() for _ in range(4))
        self._daemons: dict[str, Daemon] = {}

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
            self.keys,
            f"--rpc_address={self.host}",
            f"--rpc_port={self._rpc}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self._metrics}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_host={self.host}",
            f"--http_metadata_server_port={self._metadata}",
        )
        self._run(
            "mooncake_client",
            self._segments,
            f"--host={self.host}",
            f"--port={self._client}",
            f"--master_server_address={master}",
            f"--metadata_server={metadata}",
            "--protocol=tcp",
            "--global_segment_size=256 MB",
        )

    def _run(self, program: str, ready: Callable[[], object], *arguments: str) -> None:
        command = [sys.executable, "-m", _MODULES[program], *arguments]
        self._daemons[program] = Daemon(command, self.folder / f"{program}.log", ready)
        self._daemons[program].start()

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self._metrics}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def _segments(self) -> list[str]:
        names = self._get("/get_all_segments").split()
        if not names:
            raise OSError("no client has mounted a segment yet")
        return names

    def kill_from_elsewhere(self, program: str) -> Callable[[], None]:
        """Return what another process may call to end one of its processes as a crash would."""
        return self._daemons[program].kill_from_elsewhere()

    def kill(self, *programs: str) -> None:
        """End some of its processes, or all, as a crash would."""
        for program in programs or list(self._daemons):
            self._daemons.pop(program).kill()

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
