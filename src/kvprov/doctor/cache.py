"""The digest cache's folder."""

from __future__ import annotations

import os
import stat

from kvprov.doctor.finding import Level, Section
from kvprov.identity.digest_cache import default_cache


def cache_section() -> Section:
    """Say where digests are remembered, and why they are not. Creates nothing."""
    folder = default_cache().folder
    section = Section("cache", {"folder": str(folder), "state": "usable", "files": 0})
    try:
        status = folder.lstat()
        problem = _problem(status)
        if not problem:
            section.facts["files"] = sum(entry.suffix == ".json" for entry in folder.iterdir())
    except FileNotFoundError:
        section.facts["state"] = "not created yet"
        return section
    except (OSError, ValueError) as error:
        problem = f"it cannot be read ({error})"
    if problem:
        section.facts["state"] = "off"
        section.add(
            Level.WARNING,
            f"The digest cache is off, so checkpoints are hashed at each start: {problem}.",
            f"Run: chmod 700 {folder}; or set KVPROV_CACHE_DIR to a folder of this user's.",
        )
    return section


def _problem(status: os.stat_result) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder, or a symbolic link"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to this one"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return ""
