"""Engine processes, forked from a server that has imported SGLang once."""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.processes import Run, Step, write_to
from tests.support.sglang import children
from tests.support.sglang.engine import Launch
from tests.support.sglang.plugins import install_plugins


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
    write_to(log)
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


class Processes(processes.Processes):
    """Starts engine processes.

    Args:
        folder: Where their logs go, and the plugins of these tests.
    """

    preload = "tests.support.sglang.preload"
    child = staticmethod(_child)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._plugins = install_plugins(folder / "plugins")

    def run(self, launch: Launch, *steps: Step, timeout: float = 120) -> Run:
        launch = dataclasses.replace(launch, path=(*launch.path, self._plugins))
        return super().run(launch, *steps, timeout=timeout)

    def end(self, process: Any) -> None:
        """Wait until an engine's process has ended, and end all that it started."""
        process.join(5)
        end_group(process.pid)
        process.join()


def end_group(leader: int) -> None:
    """Kill what is left of the process group of `leader`: it outlives its leader while a member lives."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
