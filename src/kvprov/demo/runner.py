"""Runs the demo from start to end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from rich.console import Console

from kvprov.demo import model, report, table
from kvprov.demo.child import run_child
from kvprov.demo.errors import DemoError
from kvprov.demo.phase import BLOCK_TOKENS
from kvprov.demo.plan import PROCESSES, READER_POLICY, Process, loadable
from kvprov.demo.progress import Progress
from kvprov.demo.results import Outcome, Results
from kvprov.demo.store import Store
from kvprov.demo.watch import StoreWatch
from kvprov.errors import KvprovError

INTERRUPTED = 130
INSTALL = "Use `make demo` in a checkout, which installs all that is needed, or `pip install 'kvprov[vllm]'`."


def check_installed() -> None:
    """Find out before anything starts whether the engine and kvprov's plugin for it are installed.

    Raises:
        DemoError: One is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DemoError("The demo runs on the engine vLLM, which is not installed here.", INSTALL)
    if not entry_points(group="vllm.general_plugins", name="kvprov"):
        raise DemoError("kvprov is not installed here as a plugin of vLLM, so the engine would not load it.", INSTALL)


def versions(engine: str) -> dict[str, str]:
    """Return what the demo runs with. The engine says its own version: its packages have several names."""
    found = {
        "vllm": engine,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }
    for package in ("kvprov", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class _Runner:
    """The processes of one run, their stores and adapters.

    Args:
        folder: An empty folder for stores and copies.
        logs: Where logs go.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self._folder = folder
        self._logs = logs
        self._bundle = model.find()
        self._reviews = self._bundle.reviews(READER_POLICY)
        self._stores: dict[str, Store] = {}
        self.engine = ""
        self.wanted = tuple(review.answer for review in self._reviews)

    def _adapter(self, process: Process) -> Path:
        source = self._bundle.adapter(process.adapter.source)
        if not process.adapter.copied:
            return source
        copy = self._folder / "adapters" / process.adapter.name
        return Path(shutil.copytree(source, copy))

    def _store(self, process: Process) -> Store | None:
        if process.store is None:
            return None
        if process.store not in self._stores:
            folder = self._folder / "stores" / process.store
            folder.mkdir(parents=True)
            self._stores[process.store] = Store(folder)
        return self._stores[process.store]

    def run(self, process: Process) -> Outcome:
        """Run one process and return what it did."""
        adapter, store = self._adapter(process), self._store(process)
        request: dict[str, Any] = {
            "model": str(self._bundle.base),
            "store": None if store is None else str(store.folder),
            "adapter": {"name": process.adapter.name, "id": process.adapter.lora_id, "folder": str(adapter)},
            "prompts": [review.prompt for review in self._reviews],
        }
        log = self._logs / f"{process.name}.log"
        began = time.monotonic()
        read: dict[str, int] = {}
        offered: dict[str, int] = {}
        written = 0
        if store is None:
            reply = run_child(process.name, request, process.mode, self._folder, log)
            seconds = time.monotonic() - began
        else:
            offered = store.tokens_by_writer()
            with StoreWatch(store.folder, list(store.entries)) as watch:
                reply = run_child(process.name, request, process.mode, self._folder, log)
                seconds = time.monotonic() - began
                read = store.tokens_by_writer(watch.opened())
            written = store.note_written(process.adapter.worker)
        self.engine = reply["vllm"]
        return Outcome(
            process=process,
            answers=tuple(reply["answers"]),
            prompt_tokens=sum(reply["prompt_tokens"]),
            tokens_loadable=sum(loadable(tokens, BLOCK_TOKENS) for tokens in reply["prompt_tokens"]),
            tokens_loaded=reply["tokens_loaded"],
            tokens_cached=sum(reply["cached_tokens"]),
            tokens_read=read,
            tokens_offered=offered,
            entries_written=written,
            adapter_sha256=reply["adapter_sha256"],
            adapter_folder=adapter.name,
            seconds=seconds,
        )


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let the usual signals that end a program end the engine process, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(output: Path, console: Console) -> Results:
    """Run every process and return what was measured.

    Args:
        output: Logs go to a folder in it.
        console: Where progress is shown.

    Raises:
        KvprovError: A process could not be run.
    """
    check_installed()
    began = time.monotonic()
    logs = output / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    progress = Progress(console, len(PROCESSES))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kvprov-demo-", ignore_cleanup_errors=True) as folder:
        runner = _Runner(Path(folder), logs)
        for process in PROCESSES:
            with progress.step(process):
                outcomes.append(runner.run(process))
    return Results(runner.wanted, tuple(outcomes), versions(runner.engine), time.monotonic() - began)


def run_demo(output: Path, console: Console | None) -> int:
    """See `kvprov.demo.run`."""
    console = console or Console()
    output = output.resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "report.html"):
            # What an earlier run found must not pass for what this one did.
            (output / name).unlink(missing_ok=True)
        with _ending_on_signals():
            results = measure(output, console)
        (output / "results.json").write_text(json.dumps(results.to_json(), indent=2) + "\n", encoding="utf-8")
        (output / "report.html").write_text(report.render(results), encoding="utf-8")
    except KeyboardInterrupt:
        console.print("Interrupted: the engine process was ended and its stores were removed.", style="yellow")
        return INTERRUPTED
    except KvprovError as error:
        console.print(f"The demo could not run. {error.message}", style="red", markup=False, highlight=False)
        if error.advice:
            console.print(error.advice, markup=False, highlight=False)
        return 2
    except OSError as error:
        console.print(f"The demo could not run. {error}", style="red", markup=False, highlight=False)
        return 2
    table.show(results, console, output)
    return 0 if results.holds() else 1
