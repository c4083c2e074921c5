"""Engine processes, forked from a server that has imported SGLang once."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib.util
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.processes import PARALLEL, EngineDiedError, Run
from tests.support.sglang import children
from tests.support.sglang.engine import Engine, Launch
from tests.support.sglang.plugins import install_plugins

Step = Callable[[Engine], Any]


def environment() -> dict[str, str]:
    """Return what every process of these tests has in its environment."""
    [package] = importlib.util.find_spec("sglang").submodule_search_locations
    # SGLang imports the modules of all models to find one: 15 s. The tests have one.
    models = {module.name for module in pkgutil.iter_modules([str(Path(package) / "srt" / "models")])}
    return {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        # A process with threads must not fork.
        "OPENBLAS_NUM_THREADS": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(models - {"llama"})),
        # Where setting up the environment has compiled the hash of the pages.
        "TORCH_EXTENSIONS_DIR": str(Path(package).parents[3] / "torch_extensions"),
    }


def _child(connection: Connection, launch: Launch, steps: Sequence[Step], log: str) -> None:
    # A group of its own, so that all of it can be ended at once.
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable()
    children.reserve(launch.children)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 0
    try:
        engine = launch.start()
        results = [step(engine) for step in steps]
        # Pages are written in the background. The next engine finds them all.
        engine.wait_until_written()
        connection.send(("results", results))
    except BaseException as error:  # noqa: BLE001 - it is the test's business, over the pipe
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine's own end takes seconds and says nothing; its children end with this process.
    os._exit(code)


def _end_with_parent() -> None:
    """End this process and all that it started when the one that asked for it ends."""
    wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


class Processes:
    """Starts engine processes.

    Args:
        folder: Where their logs go, and the plugins of these tests.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plugins = install_plugins(folder / "plugins")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.sglang.preload"])
        self._count = 0

    def run(self, launch: Launch, *steps: Step, timeout: float = 120) -> Run:
        """Start an engine, let it take `steps`, and end it with all that it started.

        Raises:
            EngineDiedError: It raised, died, or took longer than `timeout` seconds.
        """
        self._count += 1
        log = self._folder / f"engine-{self._count}.log"
        launch = dataclasses.replace(launch, path=(*launch.path, self._plugins))
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(theirs, launch, steps, str(log)))
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
            process.join(5)
            end_group(process.pid)
            process.join()
            ours.close()
        if kind == "error":
            raise EngineDiedError(value, _read(log))
        return Run(value, _read(log))

    def run_all(self, runs: Sequence[tuple[Launch, Sequence[Step]]]) -> list[Run | EngineDiedError]:
        """Run several engines, some at a time, and return how each ended."""

        def one(item: tuple[Launch, Sequence[Step]]) -> Run | EngineDiedError:
            try:
                return self.run(item[0], *item[1])
            except EngineDiedError as error:
                return error

        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(one, runs))


def end_group(leader: int) -> None:
    """Kill what is left of the process group of `leader`: it outlives its leader while a member lives."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
