"""Hooks that other plugins register with SGLang, and that would stand in the place of a seam."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from kvprov.engines.seams import Seam


def replaced(seams: Iterable[Seam]) -> list[str]:
    """Return those of `seams` that a `REPLACE` hook stands in for.

    SGLang marks such a hook as a wrapper of what it replaces (`__wrapped__`), though it never calls it. Hooks of the
    other kinds call it. Hooks are applied when all plugins are loaded, hence after kvprov.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found = set()
    for target, hooks in HookRegistry._hooks.items():
        if any(kind is HookType.REPLACE for kind, *_ in hooks):
            owner, _, name = target.rpartition(".")
            # A class may be named by any module that imports it.
            found.add((id(pkgutil.resolve_name(owner)), name))
    names = []
    for seam in seams:
        path, _, name = f"{seam.module}.{seam.name}".rpartition(".")
        if (id(pkgutil.resolve_name(path)), name) in found:
            names.append(f"{seam.module}.{seam.name}")
    return names
