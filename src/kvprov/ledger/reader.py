"""The reader's side of a ledger: records by digest, each verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvprov.contract.errors import KvprovError
from kvprov.errors import LedgerError
from kvprov.identity.preimages import MAX_BYTES
from kvprov.ledger.location import Location, open_files, shown_location
from kvprov.ledger.record import (
    CONFIG_IDENTITY,
    CONFIGS,
    DIGESTS,
    MAX_RECORD_BYTES,
    WORKERS,
    Record,
    digest_prefix,
    file_of,
    record_name,
    verify,
    verify_config,
)

_WHERE: Final = ((DIGESTS, False), (WORKERS, True))


@dataclass(frozen=True, slots=True)
class Forged:
    """A file of the ledger that is not what its name says. It is not used.

    Attributes:
        file: Its path within the ledger.
        reason: What is wrong with it.
    """

    file: str
    reason: str


class Ledger:
    """Reads a ledger.

    Args:
        location: Where it is.

    Raises:
        LedgerError: It cannot be opened here.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._files = open_files(location)

    def find(self, text: str) -> Record | Forged | None:
        """Return the record of a digest or of a worker digest, or what is in its place, or None.

        Args:
            text: The digest's text, 43 or 22 characters.

        Raises:
            LedgerError: `text` is no digest's text, or the ledger cannot be read.
        """
        digest = digest_prefix(text)
        if digest is None:
            raise LedgerError(f"{text!r:.80} is no digest's text.", "Give the 43 or 22 characters that stand in a key.")
        forged = None
        for folder, worker_only in _WHERE:
            file = file_of(folder, record_name(digest))
            data = self._read(file, MAX_RECORD_BYTES)
            if data is None:
                continue
            record = verify(data, digest, worker_only=worker_only)
            if isinstance(record, Record):
                return record
            forged = Forged(file, record)
        return forged

    def config(self, identity: str) -> Mapping[str, Any] | Forged | None:
        """Return the configuration that an identity is the hash of, or what is in its place, or None.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        match = CONFIG_IDENTITY.fullmatch(identity)
        if match is None:
            return None
        file = file_of(CONFIGS, match[1])
        data = self._read(file, MAX_BYTES)
        if data is None:
            return None
        config = verify_config(data, match[1])
        return Forged(file, config) if isinstance(config, str) else config

    def _read(self, file: str, limit: int) -> bytes | None:
        try:
            return self._files.read(file, limit)
        except KvprovError:
            raise
        except Exception as error:  # what a service's client raises is known to fsspec's plugins alone
            raise LedgerError(
                f"The ledger {shown_location(self._location)} cannot be read: {type(error).__name__} at {file}.",
                "Check that it is reachable and that you may read it.",
            ) from error
