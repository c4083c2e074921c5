"""Workers in processes of their own, started as a user would start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvprov.check.store.check import Worker
from kvprov.errors import BindingError

LIMIT_SECONDS: Final = 900
GRACE_SECONDS: Final = 10
LAST_CHARACTERS: Final = 2000

Runner = Callable[[Worker, dict[str, Any], Mapping[str, str]], None]
"""Runs one worker, given what its module's `run` takes and the environment variables that it is to have."""


def in_a_process(module: str, work: Path, environment: Mapping[str, str], plugins: str) -> Runner:
    """Return what runs a worker as `python -m MODULE REQUEST.json`, and ends it with all that it started.

    Args:
        module: The worker's module.
        work: A folder for requests and logs.
        environment: Variables for every worker of this engine.
        plugins: The variable by which the engine chooses its plugins. Workers do not get it.
    """

    def run(worker: Worker, request: dict[str, Any], settings: Mapping[str, str]) -> None:
        asked, log = work / f"{worker.name}.json", work / f"{worker.name}.log"
        asked.write_text(json.dumps(request), encoding="utf-8")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "KVPROV_CACHE_DIR" or (not name.startswith("KVPROV_") and name != plugins)
        }
        # -P: a folder named like the engine in the working directory is not taken for the package.
        command = [sys.executable, "-P", "-m", module, str(asked)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**kept, **environment, **settings},
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
                _stop(process)
            except BaseException:
                _stop(process)
                raise
        _end_rest(process.pid)
        if code != 0:
            end = log.read_text(encoding="utf-8", errors="replace")[-LAST_CHARACTERS:].strip()
            what = f"did not end within {LIMIT_SECONDS} s" if code is None else f"ended with code {code}"
            raise BindingError(f"The worker {worker.name} {what}: ...{end}", f"Its log is {log}.")

    return run


def run_all(run: Callable[[Worker], None], workers: Sequence[Worker], parallel: int) -> None:
    """Run workers, `parallel` at a time."""
    if parallel == 1:
        # In this thread, so that an interrupt ends the worker.
        for worker in workers:
            run(worker)
        return
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(run, workers))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started: they are one group of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _end_rest(process.pid)


def _end_rest(group: int) -> None:
    """End what is left of a worker that has ended: its group outlives it while a process is in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
