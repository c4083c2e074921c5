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
from kvprov.ledger.location import shown_location
from kvprov.settings import NAMES, Mode, Settings, load_settings

_SHOWN_AS_SET = {"KVPROV_SECRET"}
_MEND = "Correct it, or unset it."


def settings_section() -> tuple[Settings, Section]:
    """Return the settings, with defaults for what cannot be used, and what there is to say about them."""
    section = Section("settings", {})
    settings, refused = _usable(section)
    if settings.mode is Mode.OFF:
        section.unsafe(
            "kvprov is off: engines share without regard to provenance.", "Unset KVPROV_MODE.", check="KVPROV_MODE"
        )
    elif settings.digest_bits is DigestBits.SHORT:
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
            refused.add("KVPROV_WEIGHTS_LABEL")
            section.unsafe(error.message, error.advice, check="KVPROV_WEIGHTS_LABEL")
    section.facts = {
        name: {"value": _shown(name, settings, name in refused), "set": name in os.environ, "refused": name in refused}
        for name in NAMES
    }
    return settings, section


def _usable(section: Section) -> tuple[Settings, set[str]]:
    """Return the settings without those that an engine would refuse to start with, and their names. Each is noted."""
    usable = {}
    refused = set()
    for name, value in sorted(os.environ.items()):
        if not name.startswith("KVPROV_"):
            continue
        # One at a time, so that the first that is wrong does not hide the others.
        try:
            load_settings({name: value})
        except KvprovError as error:
            refused.add(name)
            cause = error.__cause__
            if cause is None:
                section.unsafe(error.message, error.advice, check=name)
            else:
                why = cause.message if isinstance(cause, KvprovError) else f"{cause}."
                section.unsafe(f"{name} cannot be used: {why}", _MEND, check=name)
        else:
            usable[name] = value
    return load_settings(usable), refused


def _shown(name: str, settings: Settings, refused: bool) -> Any:
    # What stands in for a refused value would be taken for what is in effect: no engine starts with either.
    value = os.environ[name] if refused else getattr(settings, name.removeprefix("KVPROV_").lower())
    if isinstance(value, str) and name in _SHOWN_AS_SET:
        return "(set)"
    if isinstance(value, str) and name == "KVPROV_LEDGER":
        return shown_location(value)
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
        if file is not None or settings.secret is not None:
            section.facts["source"] = "refused"
        section.unsafe(error.message, error.advice)
        return section
    if secret is not None:
        section.facts["source"] = "file" if file is not None else "environment"
        section.facts["key_id"] = secret.key_id
        return section
    advice = "Set KVPROV_SECRET_FILE to a file of at least 16 random bytes, the same on every worker."
    if settings.require_secret:
        effect = "start all the same, since kvprov is off" if settings.mode is Mode.OFF else "do not start"
        section.unsafe(f"A fleet secret is required and there is none: engines {effect}.", advice)
    elif settings.mode is not Mode.OFF:
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
