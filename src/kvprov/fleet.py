"""The fleet secret, as the settings of a process name it."""

from __future__ import annotations

from kvprov.errors import SettingsError
from kvprov.identity.domain import FleetSecret, load_secret
from kvprov.settings import Settings


def fleet_secret(settings: Settings) -> FleetSecret | None:
    """Return the secret that salts are hashed with, or None when there is none and none is required.

    Raises:
        SettingsError: The secret cannot be used, or is required and missing.
    """
    secret = load_secret(file=settings.secret_file, value=settings.secret, key_id=settings.secret_key_id)
    if secret is None and settings.require_secret:
        raise SettingsError(
            "KVPROV_REQUIRE_SECRET is set and there is no fleet secret.",
            "Set KVPROV_SECRET_FILE to a file of at least 16 random bytes, the same on every worker.",
        )
    return secret
