"""Sharing domains and client namespaces: who may reuse state, named so that no salt can be read from a key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvprov.contract.descriptor import Known
from kvprov.contract.encoding import lp, u64
from kvprov.errors import SettingsError

DOMAIN: Final = "kv-domain/1"
NAMESPACE: Final = "kv-namespace/1"
TAGS: Final = "kv-tags/1"
KEY_ID: Final = "kv-key-id/1"

MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 4096

_KEY_ID: Final = re.compile(r"[a-z0-9-]{1,64}")
# The group may read: Kubernetes mounts secrets for a non-root user as 0440, in the pod's group.
_TOO_OPEN: Final = stat.S_IWGRP | stat.S_IRWXO
_MAKE_ONE: Final = "Make one with: (umask 077; openssl rand -base64 32 > FILE)"


@dataclass(frozen=True, slots=True)
class FleetSecret:
    """A secret that every worker of a fleet holds, and nobody else.

    Attributes:
        key: At least 16 bytes, random. Never shown.
        key_id: Its name, which enters identities, so that a fleet can change secrets: `[a-z0-9-]{1,64}`.
    """

    key: bytes = field(repr=False)
    key_id: str

    def __post_init__(self) -> None:
        if len(self.key) < MIN_SECRET_BYTES:
            raise SettingsError(
                f"The fleet secret has {len(self.key)} bytes, fewer than {MIN_SECRET_BYTES}.", f"{_MAKE_ONE}."
            )
        # The key id becomes part of an identity's scheme, whose grammar has no upper case and no underscore.
        if _KEY_ID.fullmatch(self.key_id) is None:
            raise SettingsError(
                f"{self.key_id[:80]!r} cannot name a fleet secret.",
                "Use 1 to 64 lower-case letters, digits and hyphens.",
            )


def _read_secret(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SettingsError(f"The fleet secret {path} is not a regular file.", f"{_MAKE_ONE}.")
            if status.st_mode & _TOO_OPEN:
                raise SettingsError(
                    f"The fleet secret {path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}).",
                    f"Run: chmod 600 {path}; and if others could read it, change the secret.",
                )
            # One byte more than allowed tells a file that is too large, without reading all of it.
            data = file.read(MAX_SECRET_BYTES + 2)
    except OSError as error:
        raise SettingsError(
            f"The fleet secret {path} cannot be read: {error.strerror or error}.",
            f"Check the path and its owner. {_MAKE_ONE}.",
        ) from error
    except ValueError as error:
        raise SettingsError(f"{str(path)!r} is no path: {error}.", "Check the setting.") from error
    data = data.removesuffix(b"\n")
    if len(data) > MAX_SECRET_BYTES:
        raise SettingsError(f"The fleet secret {path} has more than {MAX_SECRET_BYTES} bytes.", "Check the path.")
    return data


def load_secret(*, file: Path | None, value: str | None, key_id: str | None) -> FleetSecret | None:
    """Return the fleet secret that the settings give, or None when they give none.

    Args:
        file: A file that holds the secret; one newline at its end is not part of it.
        value: The secret itself, from an environment variable. At most one of `file` and `value`.
        key_id: The secret's name. Without one it is the first 8 hex digits of SHA-256 of
            `lp("kv-key-id/1") || lp(secret)`. That name is public, so it gives away 32 bits of a hash: it lets
            someone test guesses of the secret, which is hopeless against 16 random bytes, and is why short secrets
            are refused. A pass phrase that a person made up deserves a name of its own.

    Raises:
        SettingsError: both are given, or a name without a secret; the secret has fewer than 16 bytes; the file
            cannot be read, or other users can read it; the name is not `[a-z0-9-]{1,64}`.
    """
    if file is not None and value is not None:
        raise SettingsError("The fleet secret is given twice, as a file and as a value.", "Remove one of the two.")
    if file is not None:
        key = _read_secret(file)
    elif value is not None:
        try:
            # Bytes of an environment variable that are no UTF-8 reach Python as escaped surrogates.
            key = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise SettingsError("The fleet secret's value is no text.", f"{_MAKE_ONE}.") from error
    elif key_id is not None:
        raise SettingsError(
            f"The key id {key_id[:80]!r} names a fleet secret, but none is set.", "Set the secret's file as well."
        )
    else:
        return None
    if key_id is None:
        key_id = hashlib.sha256(lp(KEY_ID) + lp(key)).hexdigest()[:8]
    return FleetSecret(key, key_id)


def _bytes(value: str) -> bytes:
    # A client can send half a surrogate pair through JSON: surrogatepass gives it bytes of its own, one to one.
    return value.encode("utf-8", "surrogatepass")


def _keyed(message: bytes, secret: FleetSecret | None) -> Known:
    if secret is None:
        scheme, digest = "sha256", hashlib.sha256(message).digest()
    else:
        scheme, digest = f"hmac-sha256.{secret.key_id}", hmac.digest(secret.key, message, "sha256")
    return Known(f"{scheme}:{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}")


def sharing_domain(salt: str, secret: FleetSecret | None) -> Known:
    """Return the identity of a tenant's sharing domain.

    With a secret: `hmac-sha256.KEYID:` and base64url of HMAC-SHA-256 over `lp("kv-domain/1") || lp(salt)`. Without
    one: `sha256:` over the same bytes, which separates tenants as well, but whoever lists the store can test
    guesses of a salt.

    Args:
        salt: The tenant's salt, any text; surrogates are encoded as they are (`surrogatepass`).
        secret: The fleet's secret.
    """
    return _keyed(lp(DOMAIN) + lp(_bytes(salt)), secret)


def client_namespace(value: str, secret: FleetSecret | None) -> Known:
    """Return the identity of a client's own namespace: as `sharing_domain`, with the tag `kv-namespace/1`.

    Args:
        value: The namespace, any text; surrogates are encoded as they are (`surrogatepass`).
        secret: The fleet's secret.
    """
    return _keyed(lp(NAMESPACE) + lp(_bytes(value)), secret)


def tag_namespace(tags: Mapping[str, str], secret: FleetSecret | None) -> Known:
    """Return the identity of the namespace that a client opens by named tags, whatever their order.

    As `client_namespace`, over `lp("kv-tags/1") || u64(count) ||` for each tag by name in byte order:
    `lp(name) || lp(value)`. So no set of tags meets another one, nor a namespace of plain text.

    Args:
        tags: Values by name, any text; at least one.
        secret: The fleet's secret.
    """
    items = sorted((_bytes(name), _bytes(value)) for name, value in tags.items())
    return _keyed(lp(TAGS) + u64(len(items)) + b"".join(lp(name) + lp(value) for name, value in items), secret)
