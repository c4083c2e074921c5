"""The files of a store. Links are not followed, and nothing but regular files is opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvprov.errors import StoreError
from kvprov.identity.files import OpenFile

_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NO_FOLDER: Final = frozenset({errno.ENOTDIR, errno.ELOOP})


class Store:
    """A folder of entries.

    Args:
        root: The folder. It may be a link itself; what lies below it may not.

    Raises:
        StoreError: It is no folder, or cannot be read.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        try:
            self._fd = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"The store {str(root)!r} cannot be read: {getattr(error, 'strerror', None) or error}.",
                "Name the folder that the connector writes to, or a copy of it.",
            ) from error

    def close(self) -> None:
        """Close the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def walk(self) -> Iterator[tuple[str, bool]]:
        """Give the path of every file within the store, and whether it is a regular one, in no order.

        One folder's listing is open at a time, and no more than the names of folders to come are kept.

        Raises:
            StoreError: A folder cannot be listed.
        """
        pending = [""]
        while pending:
            folder = pending.pop()
            try:
                fd = self._folder(folder)
                if fd is None:
                    continue
                try:
                    with os.scandir(fd) as listing:
                        for item in listing:
                            path = f"{folder}/{item.name}" if folder else item.name
                            if item.is_dir(follow_symlinks=False):
                                pending.append(path)
                            else:
                                yield path, item.is_file(follow_symlinks=False)
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno in _NO_FOLDER:
                    # Replaced since it was listed.
                    continue
                raise StoreError(
                    f"{str(self.root / folder)!r} cannot be listed: {error.strerror or error}.",
                    "Check that you may read it.",
                ) from error

    def _folder(self, path: str) -> int | None:
        """Open a folder, following no link; None where there is none.

        Raises:
            OSError: It cannot be opened: it is a link, say.
        """
        fd = os.dup(self._fd)
        for name in path.split("/") if path else ():
            try:
                inner = os.open(name, _FOLDER, dir_fd=fd)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return None
                raise
            finally:
                os.close(fd)
            fd = inner
        return fd

    def has(self, path: str) -> bool:
        """Whether there is a file of this path, of whatever kind.

        Raises:
            OSError: It cannot be told.
        """
        folder, _, name = path.rpartition("/")
        fd = self._folder(folder)
        if fd is None:
            return False
        try:
            os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        finally:
            os.close(fd)
        return True

    def open(self, path: str) -> OpenFile | None:
        """Open a regular file, or return None where there is none of this path.

        Raises:
            OSError: It cannot be opened: it is a link, or may not be read.
            UnreadableContentError: It is no regular file.
        """
        folder, _, name = path.rpartition("/")
        parent = self._folder(folder)
        if parent is None:
            return None
        try:
            fd = os.open(name, _FILE, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        finally:
            os.close(parent)
        try:
            # The very file that was opened, by no path that could lead elsewhere by now.
            file = OpenFile(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        file.path = self.root / path
        return file
