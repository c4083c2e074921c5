from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest

import kvprov.identity.files as files
from kvprov.errors import ChangedContentError, UnreadableContentError
from kvprov.identity import OpenFile, Stamp, open_file
from tests.identity.support import open_descriptors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"content")
    return tmp_path / "file"


def test_opens_a_regular_file(path: Path) -> None:
    with open_file(path) as file:
        assert file.stamp == Stamp.of(path)
        assert file.stamp.size == 7
        assert Path(file.fd_path).read_bytes() == b"content"
        assert file.read(3, 4) == b"tent"
        assert file.read_all(7) == b"content"
        with file.map() as mapped:
            assert bytes(mapped) == b"content"
        assert not os.get_inheritable(file.fd)
        fd = file.fd
        file.recheck()
    assert file.fd == -1
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_reading_leaves_the_stamp(path: Path) -> None:
    with open_file(path) as file:
        path.read_bytes()
        file.recheck()


def test_follows_links_and_stays_with_the_file(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with open_file(link) as file:
        link.unlink()
        link.write_bytes(b"another")
        path.unlink()
        assert Path(file.fd_path).read_bytes() == b"content"


def test_an_empty_file_has_an_empty_map(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with open_file(tmp_path / "empty") as file:
        assert bytes(file.map()) == b""
        assert file.read_all(0) == b""


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))


HOSTILE = {
    "fifo": (_fifo, "not a regular file"),
    "folder": (Path.mkdir, "it is a folder"),
    "loop": (_loop, "form a loop"),
    "missing": (lambda path: None, "does not exist"),
    "dangling": (lambda path: path.symlink_to(path.with_name("nowhere")), "does not exist"),
    "socket": (_socket, "not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.timeout(10)
def test_refuses_what_is_no_regular_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = HOSTILE[kind]
    monkeypatch.chdir(tmp_path)
    make(Path("target"))
    with pytest.raises(UnreadableContentError, match=reason) as caught:
        open_file(Path("target"))
    assert "target" in str(caught.value)
    assert caught.value.advice


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/below"])
def test_refuses_names_that_are_no_paths(path: Path, name: str) -> None:
    with pytest.raises(UnreadableContentError) as caught:
        open_file(path.parent / name)
    assert caught.value.advice


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EACCES, "may not read it"), (errno.EMFILE, "too many open files"), (errno.EBUSY, "busy")],
)
def test_says_why_a_file_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    open_file(path).close()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnreadableContentError, match=reason):
        open_file(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_read_permission(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(UnreadableContentError, match="may not read it"):
        open_file(path)


def test_no_descriptor_leaks_when_opening_fails(tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(5):
        with pytest.raises(UnreadableContentError):
            open_file(tmp_path)
    assert open_descriptors() == before


CHANGES = {
    "written": lambda path: path.write_bytes(b"CONTENT"),
    "longer": lambda path: path.write_bytes(b"content."),
    "touched": lambda path: path.touch(),
    "time put back": lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns)),
    "mode": lambda path: path.chmod(0o400),
    "renamed": lambda path: path.rename(path.with_name("other")),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_recheck_sees_a_change(path: Path, change: str) -> None:
    with open_file(path) as file:
        file.settle()
        file.recheck()
        CHANGES[change](path)
        with pytest.raises(ChangedContentError, match="changed while it was in use") as caught:
            file.recheck()
        assert caught.value.path == path


def test_truncation_while_in_use(path: Path) -> None:
    with open_file(path) as file:
        os.truncate(path, 3)
        for use in (lambda: file.read(0, 7), lambda: file.read_into(memoryview(bytearray(7)), 0), file.map):
            with pytest.raises(ChangedContentError, match="truncated"):
                use()


def test_a_large_file_is_not_read(path: Path) -> None:
    os.truncate(path, 1 << 40)
    with open_file(path) as file, pytest.raises(UnreadableContentError, match="more than 100"):
        file.read_all(100)


def test_settled_needs_both_times_to_be_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLE_NS", 2_000_000_000)
    now = 10**18
    old, young, future = now - 2_000_000_000, now - 1_999_999_999, now + 1

    def settled(mtime: int, ctime: int) -> bool:
        return Stamp(1, 1, 0o100644, 0, mtime, ctime).settled(now)

    assert settled(old, old)
    assert not settled(young, old)
    assert not settled(old, young)
    assert not settled(future, old)
    assert not settled(old, future)


def test_settling_waits_two_seconds_for_a_young_file_and_no_longer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLE_NS", 2_000_000_000)
    with open_file(path) as file:
        began = time.monotonic()
        file.settle()
        assert 1.5 < time.monotonic() - began < 3
        assert file.stamp.settled(time.time_ns())
        began = time.monotonic()
        file.settle()
        assert time.monotonic() - began < 0.5
    os.utime(path, ns=(0, time.time_ns() + 3600 * 10**9))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with open_file(path) as file:
        file.settle()
    assert len(slept) == 1
    assert 0 < slept[0] <= 2


def test_settling_sees_a_change_since_opening(path: Path) -> None:
    with open_file(path) as file:
        path.write_bytes(b"CONTENT")
        path.chmod(0o400)
        with pytest.raises(ChangedContentError):
            file.settle()


def test_repr_names_the_file(path: Path) -> None:
    with OpenFile(path) as file:
        assert str(path) in repr(file)
