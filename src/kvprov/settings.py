"""The `KVPROV_*` settings, read once per process from the environment."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from pathlib import Path

import environ

from kvprov.contract.dimension import check_name
from kvprov.contract.errors import KvprovError
from kvprov.contract.key import DigestBits
from kvprov.errors import SettingsError
from kvprov.identity.label import check_run


class Mode(enum.StrEnum):
    """What kvprov does in an engine."""

    ENFORCE = "enforce"
    """Bind every key; bypass what is not known; refuse what cannot be bound."""
    OFF = "off"
    """Touch nothing: keys and listings are those of an engine without kvprov."""


def _mode(text: str | Mode) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        raise ValueError(f"{text!r:.80} is neither enforce nor off") from None


def _bits(text: str) -> DigestBits:
    try:
        return DigestBits(int(text))
    except ValueError:
        shown = text if text.isdecimal() else repr(text)
        raise ValueError(f"{shown:.80} is neither 256 nor 128") from None


def _flag(text: str | bool) -> bool:
    if isinstance(text, bool):
        return text
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"", "0", "false", "no", "off"}:
        return False
    raise ValueError(f"{text!r:.80} is neither yes nor no")


def _names(text: str) -> tuple[str, ...]:
    return tuple(check_name(name.strip()) for name in text.split(",") if name.strip())


_PEER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z0-9]+\]):[0-9]{1,5}")


def _peers(text: str) -> tuple[str, ...]:
    peers = tuple(peer.strip() for peer in text.split(",") if peer.strip())
    for peer in peers:
        if _PEER.fullmatch(peer) is None or int(peer.rpartition(":")[2]) not in range(1, 65536):
            raise ValueError(f"{peer!r:.80} is not HOST:PORT")
    return peers


class _Hidden(str):
    """A text that does not show in representations, and so not in logs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


def _hidden(text: str | None) -> str | None:
    return None if text is None else _Hidden(text)


def _run(text: str | None) -> str | None:
    return None if text is None else check_run(text)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _location(text: str | None) -> str | None:
    if text and not text.isprintable():
        raise ValueError("the ledger's name holds control characters")
    # Hidden: the URL of a service may hold a password.
    return _Hidden(text) if text else None


@environ.config(prefix="KVPROV", frozen=True)
class Settings:
    """Settings of one process.

    Attributes:
        mode: `KVPROV_MODE`: enforce (default) or off.
        digest_bits: `KVPROV_DIGEST_BITS`: 256 (default) or 128.
        secret: `KVPROV_SECRET`: the fleet secret itself, at least 16 bytes of UTF-8.
        secret_file: `KVPROV_SECRET_FILE`: a file with the fleet secret, which not everyone may read.
        secret_key_id: `KVPROV_SECRET_KEY_ID`: names the secret in identities, so that secrets can rotate.
        require_secret: `KVPROV_REQUIRE_SECRET`: refuse to start without a fleet secret.
        weights_label: `KVPROV_WEIGHTS_LABEL`: RUN/VERSION, an identity that the operator declares for weights that
            cannot be identified by content.
        weights_run: `KVPROV_WEIGHTS_RUN`: RUN, the training run whose updater declares a version with each update of
            the weights at run time. Naming it says that the updater is trusted.
        peers: `KVPROV_PEERS`: HOST:PORT, comma-separated: the engines from which requests may have state fetched by
            OffloadingConnector's p2p tier.
        cache_dir: `KVPROV_CACHE_DIR`: where the digest cache lives.
        ledger: `KVPROV_LEDGER`: a folder or fsspec URL to which readable descriptors of digests are written, for
            `kvprov explain`. None are written without it.
        unsafe_withhold: `KVPROV_UNSAFE_WITHHOLD`: dimensions to leave out of every key, comma-separated. For tests
            and experiments that show what a missing dimension reopens; `kvprov doctor` reports it as unsafe.
    """

    mode: Mode = environ.var(default=Mode.ENFORCE, converter=_mode)
    digest_bits: DigestBits = environ.var(default="256", converter=_bits)
    secret: str | None = environ.var(default=None, converter=_hidden)
    secret_file: Path | None = environ.var(default=None, converter=_path)
    secret_key_id: str | None = environ.var(default=None)
    require_secret: bool = environ.var(default=False, converter=_flag)
    weights_label: str | None = environ.var(default=None)
    weights_run: str | None = environ.var(default=None, converter=_run)
    peers: tuple[str, ...] = environ.var(default="", converter=_peers)
    cache_dir: Path | None = environ.var(default=None, converter=_path)
    ledger: str | None = environ.var(default=None, converter=_location)
    unsafe_withhold: tuple[str, ...] = environ.var(default="", converter=_names)


NAMES = (
    "KVPROV_MODE",
    "KVPROV_DIGEST_BITS",
    "KVPROV_SECRET",
    "KVPROV_SECRET_FILE",
    "KVPROV_SECRET_KEY_ID",
    "KVPROV_REQUIRE_SECRET",
    "KVPROV_WEIGHTS_LABEL",
    "KVPROV_WEIGHTS_RUN",
    "KVPROV_PEERS",
    "KVPROV_CACHE_DIR",
    "KVPROV_LEDGER",
    "KVPROV_UNSAFE_WITHHOLD",
)


# Kubernetes tells every pod of the services beside it: one called kvprov gives KVPROV_SERVICE_HOST and the like.
_SERVICE_LINK = re.compile(
    r"KVPROV(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP).*)?)"
)


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environment: Where to read from; the process environment by default.

    Raises:
        SettingsError: A variable that starts with `KVPROV_` is not a setting, or has a value that cannot be used.
    """
    variables = dict(os.environ if environment is None else environment)
    for name in variables:
        # A misspelt setting would silently leave an engine with the default: refuse it instead.
        if name.startswith("KVPROV_") and name not in NAMES and _SERVICE_LINK.fullmatch(name) is None:
            raise SettingsError(
                f"{name} is not a setting.", f"Correct its name or unset it. Settings are: {', '.join(NAMES)}."
            )
    try:
        settings: Settings = environ.to_config(Settings, environ=variables)
    except (ValueError, KvprovError) as error:
        why = error.message if isinstance(error, KvprovError) else f"{error}."
        raise SettingsError(
            f"A KVPROV_* setting cannot be used: {why}",
            "See `kvprov doctor` for the settings and their values.",
        ) from error
    return settings
