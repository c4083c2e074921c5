"""Digests remembered between runs, so that an unchanged checkpoint is hashed once.

After ccache's inode cache: a file whose device, inode, mode, size, mtime and ctime are those of a file hashed before,
in the same boot and on the same mount, has the same content, as long as its file system gives every write a time of
its own. Only for files that trusted users write to: adapters, which tenants write, are hashed every time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvprov.errors import KvprovError
from kvprov.identity.files import OpenFile, Stamp
from kvprov.identity.mounts import boot_id, mount_of, on_trusted_file_system
from kvprov.identity.safetensors import DTYPE_BITS
from kvprov.identity.tensors import DIGEST_BYTES, Tensor

FORMAT: Final = "kvprov-digests/1"
MAX_ENTRIES: Final = 10_000
"""How many files' digests a cache keeps: some gigabytes at most, for checkpoints of a thousand tensors a file."""

_MAX_ENTRY_BYTES: Final = 256 << 20
_SUFFIX: Final = ".json"
_LOCK_WAIT_S: Final = 900.0
_LOCK_POLL_S: Final = 0.05
_SLOTS: Final = 256

_log = logging.getLogger(__name__)


class _Unusable(Exception):  # noqa: N818 - not an error for callers: the cache is off, hashing goes on
    """Why the folder is not used."""


class DigestCache:
    """Remembers the digests of checkpoint files, in a folder of its own.

    The folder must belong to this user, and nobody else may write to it: whoever can, decides what content is
    believed to be. Otherwise, or when it cannot be created, nothing is remembered and one warning is logged: hashing
    again is always correct. Several processes may use one folder at a time.

    Args:
        folder: Where entries are kept; created when missing, with mode 0700.
        trusts: Says whether a file's time stamps show every write. By default, what is on a local file system of
            `TRUSTED_FILE_SYSTEMS`.
        max_entries: How many files are remembered; the oldest entries are removed beyond that.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        trusts: Callable[[OpenFile], bool] = on_trusted_file_system,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.folder = Path(folder)
        self._trusts = trusts
        self._max_entries = max_entries
        self._warned = False

    def get(self, file: OpenFile) -> tuple[Tensor, ...] | None:
        """Return the remembered tensors of `file`, or None when it must be hashed.

        The caller must `recheck` the file after it was loaded, as after hashing it.
        """
        key = self._key(file)
        if key is None:
            return None
        try:
            with self._opened() as folder:
                raw = self._read(folder, _name(key))
        except _Unusable as reason:
            self._warn(reason)
            return None
        return None if raw is None else _parse(raw, key)

    def put(self, file: OpenFile, tensors: tuple[Tensor, ...]) -> None:
        """Remember the tensors of `file`, which were hashed after it was opened and settled.

        What cannot be remembered is not: the file is hashed again next time.
        """
        key = self._key(file)
        if key is None:
            return
        try:
            with self._opened() as folder:
                self._write(folder, _name(key), _format(key, tensors))
                self._prune(folder)
        except _Unusable as reason:
            self._warn(reason)

    @contextmanager
    def lock(self, file: OpenFile) -> Iterator[None]:
        """Hold other processes that would hash the same file until this one has remembered it.

        A convenience only, nothing depends on it: a process that waits too long goes on without.
        """
        key = self._key(file)
        if key is None:
            yield
            return
        descriptor = -1
        try:
            try:
                with self._opened() as folder:
                    slot = int(_name(key)[:2], 16) % _SLOTS
                    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                    descriptor = os.open(f"lock-{slot:02x}", flags, 0o600, dir_fd=folder)
                    _wait_for_lock(descriptor)
            except _Unusable as reason:
                self._warn(reason)
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _key(self, file: OpenFile) -> str | None:
        if not file.stamp.settled(time.time_ns()):
            return None
        try:
            mount = mount_of(file)
            if mount is None or not self._trusts(file):
                return None
            boot = boot_id()
        except KvprovError as error:
            self._warn(error)
            return None
        stamp = {name: getattr(file.stamp, name) for name in Stamp.__slots__}
        return json.dumps({"format": FORMAT, "boot": boot, "mount": mount.id, **stamp}, sort_keys=True)

    def _warn(self, reason: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("The digest cache %s is off, so checkpoints are hashed each time: %s", self.folder, reason)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Give a descriptor of the folder, checked. All access goes through it: the path may lead elsewhere later."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            linked = getattr(error, "errno", 0) in (errno.ENOTDIR, errno.ELOOP)
            hint = " (it must not be a symbolic link)" if linked else ""
            raise _Unusable(f"it cannot be opened: {error}{hint}") from error
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                raise _Unusable(f"it belongs to user {status.st_uid}, not to this one; set KVPROV_CACHE_DIR")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _Unusable(f"other users may write to it; run: chmod 700 {self.folder}")
            yield folder
        except OSError as error:
            raise _Unusable(str(error)) from error
        finally:
            os.close(folder)

    def _read(self, folder: int, name: str) -> bytes | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.debug("Ignoring the entry %s of the digest cache: %s", name, error)
            return None
        with os.fdopen(fd, "rb") as entry:
            status = os.fstat(fd)
            ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(status.st_mode) or not ours or status.st_size > _MAX_ENTRY_BYTES:
                _log.debug("Ignoring the entry %s of the digest cache: not a file that only this user writes", name)
                return None
            return entry.read(_MAX_ENTRY_BYTES)

    def _write(self, folder: int, name: str, data: bytes) -> None:
        # A reader sees the old entry or the new one, never a part: so the name appears last.
        temporary = f".{name}.{os.getpid()}.{time.monotonic_ns()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as entry:
                entry.write(data)
            try:
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except IsADirectoryError:
                _log.debug("A folder stands where the digest cache's entry %s belongs", name)
                os.unlink(temporary, dir_fd=folder)
        except OSError:
            _unlink(temporary, folder)
            raise

    def _prune(self, folder: int) -> None:
        entries = []
        with os.scandir(folder) as found:
            for entry in found:
                stale = entry.name.startswith(".") and entry.name.count(_SUFFIX)
                if not stale and not entry.name.endswith(_SUFFIX):
                    continue
                try:
                    written = entry.stat(follow_symlinks=False).st_mtime_ns
                except FileNotFoundError:
                    # Another process pruned it first.
                    continue
                if not stale:
                    entries.append((written, entry.name))
                elif written < time.time_ns() - 3600 * 10**9:
                    # Left by a process that died while it wrote.
                    _unlink(entry.name, folder)
        for _, name in sorted(entries)[: max(0, len(entries) - self._max_entries)]:
            _unlink(name, folder)


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, IsADirectoryError) as error:
        _log.debug("Not removing %s from the digest cache: %s", name, error)


def _wait_for_lock(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_POLL_S)
        else:
            return
    _log.debug("Going on without the digest cache's lock, after %s s", _LOCK_WAIT_S)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() + _SUFFIX


def _body(key: str, tensors: list[list[object]]) -> str:
    return json.dumps({"key": key, "tensors": tensors}, sort_keys=True)


def _format(key: str, tensors: tuple[Tensor, ...]) -> bytes:
    body = _body(key, [[t.name, t.dtype, list(t.shape), t.digest.hex()] for t in tensors])
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode()


def _parse(raw: bytes, key: str) -> tuple[Tensor, ...] | None:
    """Return what an entry holds, or None when it is damaged, of another format, or of another file."""
    checksum, _, body = raw.partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        _log.debug("Ignoring a damaged entry of the digest cache")
        return None
    try:
        entry = json.loads(body)
        if entry["key"] != key:
            return None
        tensors = tuple(Tensor(str(n), str(d), tuple(s), bytes.fromhex(h)) for n, d, s, h in entry["tensors"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        _log.debug("Ignoring an entry of the digest cache: %r", error)
        return None
    sound = all(
        t.dtype in DTYPE_BITS
        and len(t.digest) == DIGEST_BYTES
        and all(type(dim) is int and dim >= 0 for dim in t.shape)
        for t in tensors
    )
    return tensors if sound else None


def default_cache() -> DigestCache:
    """Return the cache in `digests` under `KVPROV_CACHE_DIR`, else under this user's cache folder."""
    chosen = os.environ.get("KVPROV_CACHE_DIR")
    if chosen:
        base = Path(chosen)
    else:
        from platformdirs import user_cache_dir

        base = Path(user_cache_dir("kvprov"))
    return DigestCache(base / "digests")
