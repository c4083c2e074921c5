"""The settings in effect, and the fleet secret: whether it is there, never what it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from kvprov.contract.errors import KvprovError
from kvprov.contract.key import DigestBits
from kvprov.doctor.finding import Level, Section
from kvprov.identity.domain import load_secret
from kvprov.identity.label import label
from kvprov.settings import NAMES, Mode, Settings, load_settings

_SHOWN_AS_SET = ("SECRET", "TOKEN", "PASSWORD")
_MEND = "Correct it, or unset it."


def settings_section() -> tuple[Settings, Section]:
    """Return the settings, with defaults for what cannot be used, and what there is to say about them."""
    section = Section("settings", {})
    settings = _usable(section)
    section.facts = {name: {"value": _shown(name, settings), "set": name in os.environ} for name in NAMES}
    if settings.mode is Mode.OFF:
        section.unsafe(
            "kvprov is off: engines share without regard to provenance.", "Unset KVPROV_MODE.", check="KVPROV_MODE"
        )
    if settings.digest_bits is DigestBits.SHORT:
        section.add(
            Level.WARNING,
            "Keys hold 128 bits of each digest; whoever uploads adapters could search for two that collide.",
            "Unset KVPROV_DIGEST_BITS unless only you write adapters.",
            check="KVPROV_DIGEST_BITS",
        )
    if settings.weights_label is not None:
        try:
            label(settings.weights_label)
        except KvprovError as error:
            section.unsafe(error.message, error.advice, check="KVPROV_WEIGHTS_LABEL")
    return settings, section


def _usable(section: Section) -> Settings:
    """Return the settings without those that an engine would refuse to start with. Each of them is noted."""
    usable = {}
    for name, value in sorted(os.environ.items()):
        if not name.startswith("KVPROV_"):
            continue
        # One at a time, so that the first that is wrong does not hide the others.
        try:
            load_settings({name: value})
        except KvprovError as error:
            cause = error.__cause__
            if cause is None:
                section.unsafe(error.message, error.advice, check=name)
            else:
                why = cause.message if isinstance(cause, KvprovError) else f"{cause}."
                section.unsafe(f"{name} cannot be used: {why}", _MEND, check=name)
        else:
            usable[name] = value
    try:
        return load_settings(usable)
    except KvprovError as error:
        section.unsafe(error.message, error.advice)
        return load_settings({})


def _shown(name: str, settings: Settings) -> Any:
    value = getattr(settings, name.removeprefix("KVPROV_").lower())
    if isinstance(value, str) and name.endswith(_SHOWN_AS_SET):
        return "(set)"
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def secret_section(settings: Settings) -> Section:
    """Say whether there is a fleet secret, under which name, and who may read it."""
    file = settings.secret_file
    section = Section("secret", {"source": None, "key_id": None, "file_mode": _mode(file)})
    try:
        secret = load_secret(file=file, value=settings.secret, key_id=settings.secret_key_id)
    except KvprovError as error:
        section.unsafe(error.message, error.advice)
        return section
    if secret is not None:
        section.facts["source"] = "file" if file is not None else "environment"
        section.facts["key_id"] = secret.key_id
        return section
    advice = "Set KVPROV_SECRET_FILE to a file of at least 16 random bytes, the same on every worker."
    if settings.require_secret:
        section.unsafe("A fleet secret is required and there is none: engines do not start.", advice)
    else:
        section.add(
            Level.WARNING,
            "There is no fleet secret: tenants are kept apart, but whoever can list the store can test guesses of "
            "their salts.",
            advice,
        )
    return section


def _mode(file: Path | None) -> str | None:
    try:
        return None if file is None else f"{stat.S_IMODE(file.stat().st_mode):04o}"
    except (OSError, ValueError):
        # Why it cannot be read is in the finding.
        return None
