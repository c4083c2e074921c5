"""Where a ledger is: a folder, or a URL that fsspec understands."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, Final, Protocol

from kvprov.errors import LedgerError

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL: Final = frozenset({"file", "local"})
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@]*@")

Location = str
"""The text of `KVPROV_LEDGER`: a folder's path, or `scheme://...`."""


def shown_location(location: Location) -> str:
    """Return `location` for logs and reports: without a user's name and password."""
    return _CREDENTIALS.sub("...@", location)


def local_folder(location: Location) -> Path | None:
    """Return the folder that `location` names, or None where it is the URL of something else."""
    match = _SCHEME.match(location)
    if match is None:
        return Path(location)
    return Path(location[match.end() :]) if match[1].lower() in _LOCAL else None


class Files(Protocol):
    """Small files by name, as both kinds of ledger keep them."""

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a file's bytes, at most `limit` and one more, or None where there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Put `data` in place under `name`, whole or not at all."""


class Folder:
    """Files below a folder. Symbolic links below it are not followed.

    Args:
        root: The folder. It is created with the first file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str, limit: int) -> bytes | None:
        """See `Files.read`.

        Raises:
            OSError: It cannot be read.
        """
        try:
            # O_NONBLOCK: a pipe that nobody writes to would block otherwise.
            fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", str(self._root / name))
            return file.read(limit + 1)

    def write(self, name: str, data: bytes) -> None:
        """See `Files.write`.

        Raises:
            OSError: It cannot be written.
        """
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


class Remote:
    """Files below a URL. A store that puts objects in place at once, as object stores do, never shows a part of one.

    Args:
        url: The URL.

    Raises:
        LedgerError: fsspec is not installed, or knows no such URL.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise LedgerError(
                f"The ledger {shown_location(url)} is a URL, and fsspec is not installed.",
                "Install it: pip install 'kvprov[ledger]'; or name a folder.",
            ) from error
        try:
            found: tuple[Any, str] = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise LedgerError(
                f"fsspec cannot open the ledger {shown_location(url)}: {error}.",
                "Check the URL, and install the package that fsspec needs for its scheme.",
            ) from error
        self._fs, self._root = found[0], found[1].rstrip("/")
        self._made: set[str] = set()

    def read(self, name: str, limit: int) -> bytes | None:
        """See `Files.read`."""
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=0, end=limit + 1))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """See `Files.write`."""
        parent = f"{self._root}/{name.rpartition('/')[0]}"
        if parent not in self._made:
            self._fs.makedirs(parent, exist_ok=True)
            self._made.add(parent)
        self._fs.pipe_file(f"{self._root}/{name}", data)


def open_files(location: Location) -> Files:
    """Open what `location` names. A folder need not be there yet, and no URL is asked for anything.

    Raises:
        LedgerError: The URL cannot be opened here.
    """
    folder = local_folder(location)
    return Remote(location) if folder is None else Folder(folder)
