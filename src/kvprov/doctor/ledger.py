"""The ledger: whether workers that are started here could write to it."""

from __future__ import annotations

import os
from pathlib import Path

from kvprov.doctor.finding import Level, Section
from kvprov.errors import LedgerError
from kvprov.ledger.location import local_folder, open_files, shown_location
from kvprov.settings import Settings


def ledger_section(settings: Settings) -> Section:
    """Say where descriptors are recorded. Creates nothing, and asks no service: a ledger out of reach is no danger."""
    location = settings.ledger
    if location is None:
        return Section("ledger", {"location": None, "state": "off"})
    section = Section("ledger", {"location": shown_location(location), "state": "usable"})
    folder = local_folder(location)
    if folder is not None:
        problem, advice = _problem(folder), f"Create {folder}, and let the engine's user write to it."
    else:
        problem, advice = "", ""
        try:
            open_files(location)
        except LedgerError as error:
            problem, advice = error.message.rstrip("."), error.advice
        else:
            section.facts["state"] = "not asked"
    if problem:
        section.facts["state"] = "unusable"
        section.add(
            Level.WARNING,
            f"Descriptors cannot be recorded, so that kvprov explain will know nothing: {problem}.",
            advice,
            check="KVPROV_LEDGER",
        )
    return section


def _problem(folder: Path) -> str:
    """Return why a folder cannot be written to, or an empty text."""
    there = folder
    while not there.exists() and there != there.parent:
        # Workers create what is missing.
        there = there.parent
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"this user may not write to {there}"
