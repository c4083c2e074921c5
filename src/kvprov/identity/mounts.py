"""Which mount holds an open file, and whether its time stamps can be trusted to show every write."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvprov.errors import UnreadableContentError
from kvprov.identity.files import OpenFile, unreadable

TRUSTED_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
"""Local file systems on which each write, also through a memory map once its pages are clean, gives a new ctime.

Not among them, for instance: network file systems and FUSE (another machine writes, its clock decides), overlayfs (a
copy-up swaps the file below), tmpfs (a write through a memory map leaves the times as they are, tried on Linux 6.18)
and zfs (such a write shows only at writeback).
"""

_STATX_MNT_ID_UNIQUE: Final = 0x4000
_AT_EMPTY_PATH: Final = 0x1000
_STATX_BYTES: Final = 256
_STATX_MNT_ID_AT: Final = 144
_MNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that holds a file.

    Attributes:
        id: `unique:N`, never used again until the next boot (Linux 6.8 and later), or `reused:N`, which another mount
            may get after this one is unmounted.
        file_system: Its type, for instance `ext4`.
    """

    id: str
    file_system: str


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the kernel's id of this boot.

    Raises:
        UnreadableContentError: the kernel gives none.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise unreadable(path, error) from error


def _unique_mount_id(fd: int) -> int | None:
    # Imported here, since only digest caches need it. Python has no statx before 3.15; its struct has the same
    # layout on every architecture.
    import ctypes

    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    result = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID_UNIQUE, result) != 0:
        return None
    mask = int.from_bytes(result.raw[:4], sys.byteorder)
    if not mask & _STATX_MNT_ID_UNIQUE:
        return None
    return int.from_bytes(result.raw[_STATX_MNT_ID_AT : _STATX_MNT_ID_AT + 8], sys.byteorder)


def mount_of(file: OpenFile) -> Mount | None:
    """Return the mount that holds `file`, or None when the kernel does not tell.

    The mount is found by the id that the kernel gives for the descriptor. The device number would not do: btrfs
    gives each subvolume one of its own, which `/proc/self/mountinfo` does not list.

    Raises:
        UnreadableContentError: `/proc` cannot be read.
    """
    try:
        match = _MNT_ID.search(Path(f"/proc/self/fdinfo/{file.fd}").read_text())
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError as error:
        raise UnreadableContentError("/proc", f"the file's mount is not known ({error})", "Mount /proc.") from error
    if match is None:
        return None
    # 36 35 98:0 /root /point rw,noatime master:1 - ext4 /dev/sda1 rw: see proc_pid_mountinfo(5).
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ", 1)[0] == match[1] and after:
            unique = _unique_mount_id(file.fd)
            number = f"reused:{match[1]}" if unique is None else f"unique:{unique}"
            return Mount(number, after.split(" ", 1)[0])
    return None


def on_trusted_file_system(file: OpenFile) -> bool:
    """Say whether `file` is on one of `TRUSTED_FILE_SYSTEMS`. What is not known is not trusted.

    Raises:
        UnreadableContentError: `/proc` cannot be read.
    """
    mount = mount_of(file)
    return mount is not None and mount.file_system in TRUSTED_FILE_SYSTEMS
