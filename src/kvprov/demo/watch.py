"""Sees, from outside the engine, which entries of a store a process opens. Linux's inotify, standard library only.

The engine's own counters say how much it loaded, but not whose entries those were: that is what the kernel tells here.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvprov.demo.errors import DemoError

_IN_OPEN: Final = 0x20
_IN_Q_OVERFLOW: Final = 0x4000
_IN_ISDIR: Final = 0x40000000
_EVENT: Final = struct.Struct("iIII")


class StoreWatch:
    """While it is entered, notes which of a store's folders have a file opened in them.

    Args:
        store: The store, one folder an entry.
        entries: The names of the folders to watch.

    Raises:
        DemoError: The kernel does not allow it.
    """

    def __init__(self, store: Path, entries: list[str]) -> None:
        self._store = store
        self._entries = entries
        self._names: dict[int, str] = {}
        self._fd = -1

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for entry in self._entries:
            watch = libc.inotify_add_watch(self._fd, os.fsencode(self._store / entry), _IN_OPEN)
            if watch < 0:
                reason = os.strerror(ctypes.get_errno())
                self.close()
                raise DemoError(
                    f"The kernel does not let the demo watch its stores (inotify: {reason}).",
                    "Close programs that watch many files, or raise fs.inotify.max_user_watches and _instances.",
                )
            self._names[watch] = entry
        return self

    def opened(self) -> set[str]:
        """Return the entries that were opened since the last call.

        Raises:
            DemoError: The kernel lost events.
        """
        found: set[str] = set()
        while True:
            try:
                events = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            offset = 0
            while offset < len(events):
                watch, mask, _cookie, length = _EVENT.unpack_from(events, offset)
                offset += _EVENT.size + length
                if mask & _IN_Q_OVERFLOW:
                    raise DemoError(
                        "The kernel lost events of the watched store.", "Raise fs.inotify.max_queued_events."
                    )
                if mask & _IN_OPEN and not mask & _IN_ISDIR:
                    found.add(self._names[watch])

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
