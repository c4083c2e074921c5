"""Which of HiCache's storage backends are audited, how; and whether SGLang has any that is not known here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvprov.check.audit.sglang.binding import Binder
from kvprov.check.audit.sglang.world import KeysOf, World
from kvprov.check.audit.subject import Budget, Subject

BUDGET: Final = Budget(samples=512, seconds=0.1, few=3)
FILE: Final = "file"
_NEEDS: Final = {"mooncake": "mooncake", "nixl": "nixl", "seaweedfs": "botocore"}
"""Backends that cannot even be made without a package, and have no driver yet."""


def _file_names(backend: Any, hashes: list[str]) -> list[str]:
    return [backend._get_component_key(name) for name in hashes]


@dataclass(slots=True)
class Catalogue:
    """What of SGLang is audited.

    Attributes:
        subjects: What is.
        refused: Backends without a driver that kvprov refuses, or that share nothing, with the reason.
        unknown: Backends that nobody knows, or that are bound and have no driver.
        skipped: Those whose packages are not installed.
    """

    subjects: list[Subject] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def catalogue(root: Path, others: list[Subject]) -> Catalogue:
    """Return what is audited of the installed SGLang, and what of it is not known.

    Args:
        root: A folder for files.
        others: Subjects that other packages declare.
    """
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    world = World(root)
    extra = {"file_storage_path": str(root / "pages")}
    found = Catalogue(list(others))
    registered = set(StorageBackendFactory._registry)
    if FILE in registered:
        bound = KeysOf(world, FILE, extra, _file_names, Binder(world).start)
        native = KeysOf(world, FILE, extra, _file_names)
        note = "adapters that the engine was started with"
        found.subjects.append(Subject(_row(FILE), FILE, native, bound, note=note, budget=BUDGET))
    for name in sorted(registered - {FILE} - {subject.connector for subject in others}):
        reason = _reason(name)
        if reason:
            found.refused[_row(name)] = reason
        elif name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
            found.skipped[_row(name)] = f"{_NEEDS[name]} is not installed"
        else:
            found.unknown.append(_row(name))
    return found


def _row(backend: str) -> str:
    return f"HiCache storage ({backend})"


def _reason(name: str) -> str:
    """Return why a backend without a driver needs none; empty when nothing says so. Refusal is tried, not looked up."""
    from kvprov.engines.sglang import paths
    from kvprov.errors import BindingError

    entry = paths.BACKENDS.get(name)
    if entry is None:
        return ""
    why = f"{entry.treatment}: {entry.reason}"
    try:
        allowed = paths.check_backend(name, None)
    except BindingError:
        return why
    return why if allowed.treatment is paths.Treatment.LOCAL else ""
