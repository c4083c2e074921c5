"""A server of a test's own, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


class Daemon:
    """A process that serves on the loopback address. A context manager: started at its begin, ended at its end.

    Args:
        command: Its command line.
        log: Where its output goes.
        ready: Called until it no longer raises an `OSError`, which says that the server is up.
        environment: More environment variables.
        patience: Seconds to wait for it.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], object],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 120,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._command, self.log, self._ready, self._patience = command, log, ready, patience
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            RuntimeError: It did not come up.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._ready()
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
            else:
                return
        self.kill()
        raise RuntimeError(f"{self._command} did not come up\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """End it as a crash would, and start it again."""
        self.kill()
        self.start()

    def kill_from_elsewhere(self) -> Callable[[], None]:
        """Return what another process may call to end it as a crash would."""
        assert self._process is not None
        return partial(os.kill, self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
