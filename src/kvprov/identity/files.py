"""Files opened once, so that what is hashed and what is loaded can be shown to be the same bytes."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvprov.errors import ChangedContentError, UnreadableContentError

SETTLE_NS: Final = 2_000_000_000
"""How old a file's timestamps must be before an unchanged stamp proves unchanged content: 2 s, in nanoseconds.

Two writes within one tick of a file system's clock leave one timestamp. FAT has the coarsest clock, 2 s.
"""

_ADVICE: Final = {
    errno.ENOENT: ("it does not exist", "Check the path, and that the download or upload is complete."),
    errno.EACCES: ("this user may not read it", "Give the engine's user read access to the file and its folders."),
    errno.EPERM: ("this user may not read it", "Give the engine's user read access to the file and its folders."),
    errno.ELOOP: ("its symbolic links form a loop", "Replace the link by the file that it should lead to."),
    errno.EISDIR: ("it is a folder, not a file", "Name a regular file."),
    errno.ENOTDIR: ("a part of its path is not a folder", "Check the path."),
    errno.ENAMETOOLONG: ("its name is too long", "Use a shorter path."),
    errno.ENXIO: ("it is a socket or a device, not a regular file", "Name a regular file."),
    errno.EMFILE: ("this process has too many open files", "Raise the limit of open files (ulimit -n)."),
    errno.ENFILE: ("this machine has too many open files", "Raise the kernel's limit of open files (fs.file-max)."),
    errno.EIO: ("its storage reports an input/output error", "Check the disk, or fetch the file again."),
    errno.ESTALE: ("the file server no longer knows it", "Mount the file system again, or open the file again."),
}


def unreadable(path: str | Path, error: OSError) -> UnreadableContentError:
    """Return the error that says why `path` could not be opened or read, with advice."""
    reason, advice = _ADVICE.get(
        error.errno or 0,
        (error.strerror or str(error), "Check the file and the file system that holds it."),
    )
    return UnreadableContentError(path, reason, advice)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file system says of a file without reading it. Reading a file leaves its stamp as it is.

    Attributes:
        device: Number of the device that holds the file.
        inode: Number of the file on that device.
        mode: Type and permission bits.
        size: Bytes.
        mtime_ns: When the content changed last, nanoseconds since 1970. Its owner can set it at will.
        ctime_ns: When the file changed last in any way, nanoseconds since 1970. Only the kernel sets it.
    """

    device: int
    inode: int
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, target: int | str | Path) -> Stamp:
        """Return the stamp of an open file, given its descriptor, or of what a path leads to.

        Raises:
            OSError: the file system's.
        """
        s = os.stat(target)  # noqa: PTH116 - a descriptor has no Path
        return cls(s.st_dev, s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns)

    def settled(self, now_ns: int) -> bool:
        """Say whether, at `now_ns`, neither timestamp is younger than `SETTLE_NS` nor lies in the future."""
        return max(self.mtime_ns, self.ctime_ns) <= now_ns - SETTLE_NS


class OpenFile:
    """A regular file, open for reading, with the stamp that it had when it was opened. A context manager.

    Attributes:
        path: The path that was opened. Afterwards it may lead elsewhere; the descriptor does not.
        fd: The descriptor, closed on `exec`. -1 once closed.
        stamp: The stamp at opening.
    """

    __slots__ = ("_opened_ns", "fd", "path", "stamp")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.fd = -1
        try:
            # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise wait forever.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.stamp = Stamp.of(self.fd)
        except ValueError as error:
            # A NUL byte in the path.
            raise UnreadableContentError(repr(str(path)), f"it is no path ({error})", "Check the path.") from error
        except OSError as error:
            self.close()
            raise unreadable(path, error) from error
        self._opened_ns = time.monotonic_ns()
        if not stat.S_ISREG(self.stamp.mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(self.stamp.mode) else "a pipe, socket or device"
            raise UnreadableContentError(path, f"it is {kind}, not a regular file", "Name a regular file.")

    @property
    def fd_path(self) -> str:
        """A path that leads this process to this very file, wherever the original path leads by now.

        Only in this process: another one's `/proc/self` is its own.
        """
        return f"/proc/self/fd/{self.fd}"

    def recheck(self) -> None:
        """Check that the file is as it was when it was opened.

        Raises:
            ChangedContentError: its stamp differs.
            UnreadableContentError: the file system no longer answers.
        """
        try:
            now = Stamp.of(self.fd)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if now != self.stamp:
            changed = [name for name in Stamp.__slots__ if getattr(now, name) != getattr(self.stamp, name)]
            raise ChangedContentError(
                self.path,
                f"the file changed while it was in use ({', '.join(changed)})",
                "Start again once nothing writes to it; publish new versions under a new name.",
            )

    def settle(self) -> None:
        """Make sure that from now on every write to the file shows in its stamp, then check the stamp.

        Two kinds of write would not show. One within the tick of the clock in which the file changed last: so
        this waits, at most `SETTLE_NS` after opening. The kernel's clock has then moved on from whatever time the
        stamp holds, even if another machine's clock, ahead or behind, wrote it. And one through a shared memory map
        whose page is dirty already: so this writes dirty pages back, after which the next write faults and takes
        a new time (ext4, xfs, btrfs, f2fs; tmpfs never does so, and is not trusted with a digest cache).

        Raises:
            ChangedContentError: the file changed since it was opened.
            UnreadableContentError: the file cannot be written back or no longer answers.
        """
        if not self.stamp.settled(time.time_ns()):
            wait_ns = self._opened_ns + SETTLE_NS - time.monotonic_ns()
            young_ns = max(self.stamp.mtime_ns, self.stamp.ctime_ns) + SETTLE_NS - time.time_ns()
            time.sleep(max(0, min(wait_ns, young_ns)) / 1e9)
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise unreadable(self.path, error) from error
        self.recheck()

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` on.

        Raises:
            ChangedContentError: the file ends sooner than its stamp says.
            UnreadableContentError: the file cannot be read.
        """
        parts = []
        while size:
            try:
                part = os.pread(self.fd, min(size, 1 << 30), start)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not part:
                raise self._truncated()
            parts.append(part)
            start += len(part)
            size -= len(part)
        return b"".join(parts)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the file's bytes from byte `start` on.

        Raises:
            ChangedContentError: the file ends sooner than its stamp says.
            UnreadableContentError: the file cannot be read.
        """
        while len(buffer):
            try:
                n = os.preadv(self.fd, [buffer], start)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not n:
                raise self._truncated()
            buffer = buffer[n:]
            start += n

    def read_all(self, limit: int) -> bytes:
        """Return the whole file, when it has at most `limit` bytes.

        Raises:
            ChangedContentError: the file ends sooner than its stamp says.
            UnreadableContentError: the file is larger, or cannot be read.
        """
        if self.stamp.size > limit:
            raise UnreadableContentError(
                self.path, f"it has {self.stamp.size} bytes, more than {limit}", "Check that it is the right file."
            )
        return self.read(0, self.stamp.size)

    def map(self) -> mmap.mmap | memoryview:
        """Return a read-only memory map of the file's bytes, or an empty view when it has none.

        Reading a map past the end of a file that someone truncated, or over a bad sector, kills the process
        (SIGBUS). So map only what a trusted user owns; `read_into` what a tenant can touch.

        Raises:
            ChangedContentError: the file is smaller than its stamp says.
            UnreadableContentError: the file system cannot map it.
        """
        if self.stamp.size == 0:
            return memoryview(b"")
        try:
            return mmap.mmap(self.fd, self.stamp.size, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise self._truncated() from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _truncated(self) -> ChangedContentError:
        return ChangedContentError(
            self.path,
            "the file was truncated while it was in use",
            "Start again once nothing writes to it; publish new versions under a new name.",
        )

    def close(self) -> None:
        """Close the descriptor. Closing twice is allowed."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenFile({str(self.path)!r}, fd={self.fd})"


def open_file(path: str | Path) -> OpenFile:
    """Open a regular file for reading. Symbolic links are followed, as engines follow them.

    Raises:
        UnreadableContentError: it cannot be opened, or is no regular file.
    """
    return OpenFile(path)
