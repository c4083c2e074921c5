"""What every engine's binding is made of: values that are not known, and the worker half at one time."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvprov.contract.descriptor import Absent, Known, Unknown, Value
from kvprov.contract.digest import Digester
from kvprov.contract.key import NONCE_BYTES, key_text, nonce
from kvprov.contract.registry import Registry
from kvprov.errors import SettingsError
from kvprov.extensions import Extension
from kvprov.identity.domain import FleetSecret
from kvprov.identity.label import label
from kvprov.settings import Settings


def with_nonces(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return `values` with an identity of its own, never used again, in place of each that is not known."""
    return {
        name: nonce(secrets.token_bytes(NONCE_BYTES)) if isinstance(value, Unknown) else value
        for name, value in values.items()
    }


def extension_value(extension: Extension, subject: Any) -> Value:
    """Return what `extension` says of a configuration or a request; unknown when it fails, as on hostile requests."""
    name = extension.dimension.name
    try:
        value = extension.value(subject)
    except Exception as error:  # noqa: BLE001 - code of others, which may raise anything
        return Unknown(f"{name}: its value could not be found ({type(error).__name__})")
    if not isinstance(value, Absent | Known | Unknown):
        return Unknown(f"{name}: its value is a {type(value).__name__}")
    return value if not isinstance(value, Unknown) else Unknown(f"{name}: {value.reason.removeprefix(f'{name}: ')}")


def declared_weights(run: str | None, version: object) -> Value:
    """Return what an updater's `version` says of the weights, where the operator has named its `run`."""
    if run is None:
        return Unknown("weights: a version was declared, but KVPROV_WEIGHTS_RUN does not say of which run")
    if not isinstance(version, str):
        return Unknown("weights: the version that was declared is no text")
    try:
        return label(f"{run}/{version}")
    except SettingsError as error:
        return Unknown(f"weights: {error.message}")


@dataclass(frozen=True, slots=True)
class WorkerHalf:
    """What the workers of an engine are at one time. Read as one, since requests are stamped in several threads.

    Attributes:
        epoch: Counts the changes.
        values: Of the worker half's dimensions.
        digester: With an identity of its own in place of each value that is not known.
        changing: Whether the weights may be changing right now, so that not even two requests of this engine share.
    """

    epoch: int
    values: dict[str, Value]
    digester: Digester
    changing: bool = False

    @property
    def reason(self) -> str:
        """Why it is not known; empty when it is."""
        return "; ".join(value.reason for value in self.values.values() if isinstance(value, Unknown))


def announce(
    logger: logging.Logger,
    where: str,
    *,
    settings: Settings,
    registry: Registry,
    worker: WorkerHalf,
    secret: FleetSecret | None,
) -> None:
    """Log the start-up line (mode, path, dimensions, worker digest), and the worker's identities.

    Args:
        logger: The engine's.
        where: How the engine names the path by which it shares, such as `connector=NAME`.
        settings: The process's.
        registry: The registered dimensions.
        worker: The worker half.
        secret: The fleet's, or None.
    """
    parts = [
        f"mode={settings.mode}",
        where,
        f"dimensions={','.join([*registry.worker, *registry.request])}",
        f"worker={key_text(worker.digester.worker_digest, settings.digest_bits)}",
        f"bits={int(settings.digest_bits)}",
        f"secret={secret.key_id if secret else 'none'}",
    ]
    if worker.reason:
        parts.append(f"unknown=({worker.reason})")
    if settings.unsafe_withhold:
        parts.append(f"UNSAFE: withheld={','.join(settings.unsafe_withhold)}")
    level = logging.WARNING if worker.reason or settings.unsafe_withhold else logging.INFO
    logger.log(level, "kvprov: %s", " ".join(parts))
    # For two workers that do not share: the one that differs says why.
    for name, value in sorted(worker.values.items()):
        logger.info("kvprov: %s=%s", name, value.identity if isinstance(value, Known) else value)
