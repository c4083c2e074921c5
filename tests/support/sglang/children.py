"""Child processes that were forked before they are needed.

SGLang starts its scheduler and its detokenizer with `spawn`: a new interpreter each, which imports SGLang anew for
10 s and more. Here a process forks them while it is still clean (SGLang imported, no plugin loaded, nothing
configured), and `spawn` gives one of them the work. So each one starts from the state that a new interpreter would
reach, is a real child of the process, takes its arguments by pickle and loads the plugins itself.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import socket
import sys
import traceback
from multiprocessing import context, popen_fork, process, reduction, util
from typing import Any

PR_SET_PDEATHSIG = 1
LENGTH = 8

_idle: list[tuple[int, socket.socket]] = []
_received: list[int] = []


def reserve(count: int) -> None:
    """Fork `count` children that wait for work, and let `spawn` use them from now on."""
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                for _, other in _idle:
                    other.close()
                code = _wait_for_work(theirs)
            except BaseException:  # noqa: BLE001 - nobody is left to see it
                traceback.print_exc()
            finally:
                util._flush_std_streams()
                os._exit(code)
        theirs.close()
        _idle.append((pid, ours))
    context.SpawnProcess._Popen = staticmethod(_Popen)


def end_with_parent() -> None:
    """Be killed when the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Passed:
    """A file descriptor on its way to the child."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return _received[self.index]


class _Popen(popen_fork.Popen):
    method = "spawn"
    DupFd = _Passed

    def __init__(self, process_object: Any) -> None:
        self._passed: list[int] = []
        super().__init__(process_object)

    def duplicate_for_child(self, descriptor: int) -> int:
        self._passed.append(descriptor)
        return len(self._passed) - 1

    def _launch(self, process_object: Any) -> None:
        if not _idle:
            raise RuntimeError("no child is left for SGLang to start: raise Launch.children")
        work = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump((dict(os.environ), list(sys.path)), work)
            reduction.dump(process_object, work)
        finally:
            context.set_spawning_popen(None)
        self.pid, connection = _idle.pop(0)
        self.sentinel, alive = os.pipe()
        with connection:
            data = work.getbuffer()
            connection.sendall(len(self._passed).to_bytes(LENGTH, "big") + len(data).to_bytes(LENGTH, "big"))
            reduction.sendfds(connection, [alive, *self._passed])
            connection.sendall(data)
        os.close(alive)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel,))


def _wait_for_work(connection: socket.socket) -> int:
    end_with_parent()
    with connection:
        head = _read(connection, 2 * LENGTH)
        if not head:
            return 0
        count, length = int.from_bytes(head[:LENGTH], "big"), int.from_bytes(head[LENGTH:], "big")
        # The first one is the sentinel: it closes when this process ends.
        _received[:] = reduction.recvfds(connection, 1 + count)[1:]
        work = io.BytesIO(_read(connection, length))
    _idle.clear()
    process.current_process()._inheriting = True
    try:
        environment, path = reduction.pickle.load(work)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        process_object = reduction.pickle.load(work)
    finally:
        del process.current_process()._inheriting
    return int(process_object._bootstrap())


def _read(connection: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
