"""Engine processes, forked from a server that has imported vLLM once."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.engine import Launch

PARALLEL = 2
"""Engines at a time: each one mostly keeps a single core busy."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    # Else engines that run side by side may bind their threads to one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

Step = Callable[[Any], Any]


class EngineDiedError(Exception):
    """An engine process that did not finish its steps."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message, log)
        self.message = message
        self.log = log

    def __str__(self) -> str:
        return f"{self.message}\n{self.log[-4000:]}"


@dataclass(frozen=True)
class Run:
    """One finished engine process.

    Attributes:
        results: What each step returned.
        log: What the process wrote.
    """

    results: list[Any]
    log: str


def _child(connection: Connection, launch: Launch, steps: Sequence[Step], log: str) -> None:
    write_to(log)
    code = 0
    try:
        engine = launch.start()
        connection.send(("results", [step(engine) for step in steps]))
    except BaseException as error:  # noqa: BLE001 - it is the test's business, over the pipe
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine's own end takes seconds and says nothing; its children end with this process.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        os._exit(code)


def write_to(log: str) -> None:
    """Let all that this process writes go to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable()


class Processes:
    """Starts engine processes.

    Args:
        folder: Where their logs go.
    """

    preload = "tests.support.preload"
    """What the fork server imports."""
    child = staticmethod(_child)
    """What runs in an engine's process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([self.preload])
        self._count = 0

    def run(self, launch: Any, *steps: Step, timeout: float = 240) -> Run:
        """Start an engine, let it take `steps`, and end it.

        Raises:
            EngineDiedError: It raised, died, or took longer than `timeout` seconds.
        """
        self._count += 1
        log = self._folder / f"engine-{self._count}.log"
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self.child, args=(theirs, launch, steps, str(log)))
        process.start()
        theirs.close()
        try:
            if not ours.poll(timeout):
                raise EngineDiedError(f"no answer within {timeout} s", _read(log))
            kind, value = ours.recv()
        except EOFError:
            process.join(10)
            raise EngineDiedError(f"the process ended with {process.exitcode}", _read(log)) from None
        finally:
            self.end(process)
            ours.close()
        if kind == "error":
            raise EngineDiedError(value, _read(log))
        return Run(value, _read(log))

    def end(self, process: Any) -> None:
        """Wait until an engine's process has ended, and end it if it does not."""
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()

    def run_all(self, runs: Sequence[tuple[Any, Sequence[Step]]]) -> list[Run | EngineDiedError]:
        """Run several engines, some at a time, and return how each ended."""

        def one(item: tuple[Any, Sequence[Step]]) -> Run | EngineDiedError:
            try:
                return self.run(item[0], *item[1])
            except EngineDiedError as error:
                return error

        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(one, runs))


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
