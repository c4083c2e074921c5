"""Runs one engine process: its environment, its log, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvprov.demo.errors import DemoError

ENGINE_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Each of the demo's processes is one engine already. vLLM's default would start two more inside each, which takes
    # 31 to 36 s a process on 2 cores, over 4 minutes in all, against 18 to 22 s (both beside other work).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The model is tiny: a second thread gains nothing on an idle machine, and its spinning costs half a minute a
    # process on a busy one.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
LIMIT_SECONDS: Final = 600
GRACE_SECONDS: Final = 10
LAST_LINES: Final = 15

_ADVICE: Final = (
    ("No space left on device", "Free about 300 MB in the folder for temporary files, or set TMPDIR to another one."),
    ("Cannot allocate memory", "Free memory: an engine of the demo needs about 3 GB."),
    ("MemoryError", "Free memory: an engine of the demo needs about 3 GB."),
    ("out of memory", "Free memory: an engine of the demo needs about 3 GB."),
    ("BindingError", "This vLLM is not one that kvprov binds: `kvprov doctor` says which are."),
    ("ImportError", "The engine is not installed properly: use `make demo` in a checkout."),
    ("ModuleNotFoundError", "The engine is not installed properly: use `make demo` in a checkout."),
)


def environment(mode: str, caller: Mapping[str, str]) -> dict[str, str]:
    """Return a process's environment: the caller's, without what would change what the demo shows."""
    kept = {name: value for name, value in caller.items() if not name.startswith("KVPROV_") and name != "VLLM_PLUGINS"}
    return {**kept, **ENGINE_ENVIRONMENT, "KVPROV_MODE": mode}


def advice(log: str, code: int | None) -> str:
    """Return what to do about a process that failed."""
    if code == -signal.SIGKILL:
        return "It was killed, most likely for want of memory: an engine of the demo needs about 3 GB."
    return next((text for sign, text in _ADVICE if sign in log), "Run `kvprov doctor` to see what it finds.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and what it started: they are one group of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_child(name: str, request: dict[str, Any], mode: str, folder: Path, log: Path) -> dict[str, Any]:
    """Run `kvprov.demo.phase` in a fresh interpreter and return its reply.

    Args:
        name: The process's name.
        request: What it is to do.
        mode: The value of KVPROV_MODE.
        folder: Where request and reply are written, and its working directory.
        log: Where its output goes.

    Raises:
        DemoError: It failed, or took too long. The error shows the end of its log.
    """
    asked, replied = folder / f"{name}.request.json", folder / f"{name}.reply.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    # -P: a folder named vllm or kvprov in the working directory is not taken for the package.
    command = [sys.executable, "-P", "-m", "kvprov.demo.phase", str(asked), str(replied)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(mode, os.environ),
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            _stop(process)
        except BaseException:
            _stop(process)
            raise
    if code != 0 or not replied.exists():
        text = log.read_text(encoding="utf-8", errors="replace")
        end = "\n".join(text.rstrip().splitlines()[-LAST_LINES:])
        what = f"did not end within {LIMIT_SECONDS} s" if code is None else f"ended with code {code}"
        raise DemoError(f"The engine process {name} {what}. The end of {log}:\n\n{end}\n", advice(text, code))
    reply: dict[str, Any] = json.loads(replied.read_text(encoding="utf-8"))
    return reply
