from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import kvprov.identity.mounts as module
from kvprov.errors import UnreadableContentError
from kvprov.identity import open_file
from kvprov.identity.mounts import TRUSTED_FILE_SYSTEMS, Mount, boot_id, mount_of, on_trusted_file_system

LINES = {
    "ext4": "7 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw",
    "btrfs": "7 1 0:99 /sub /data rw - btrfs /dev/sdb rw,subvol=/sub",
    "overlay": "7 1 0:40 / / rw - overlay overlay rw,lowerdir=/a",
    "nfs4": "7 1 0:41 / /m rw - nfs4 host:/m rw",
    "fuse.sshfs": "7 1 0:41 / /m rw - fuse.sshfs host:/m rw",
    "tmpfs": "7 1 0:42 / /m rw - tmpfs tmpfs rw",
    "with space": "7 1 8:1 / /a\\040-\\040b rw - ext4 /dev/sda1 rw",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"x")
    return tmp_path / "file"


def with_proc(monkeypatch: pytest.MonkeyPatch, fdinfo: str, mountinfo: str) -> None:
    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        return {"fdinfo": fdinfo, "self": mountinfo}[self.parent.name]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_finds_the_mount_of_this_file(path: Path) -> None:
    with open_file(path) as file:
        mount = mount_of(file)
        assert mount is not None
        assert mount == mount_of(file)
        devices = {}
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            devices.setdefault(fields[2], set()).add(fields[fields.index("-") + 1])
    status = path.stat()
    assert mount.file_system in devices.get(f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}", {mount.file_system})


def test_two_mounts_differ(path: Path) -> None:
    with open_file(path) as file, open_file("/proc/self/mountinfo") as other:
        here, there = mount_of(file), mount_of(other)
        assert here is not None
        assert there is not None
        assert here.id != there.id
        assert there.file_system == "proc"
        assert not on_trusted_file_system(other)


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 8), reason="old"
)
def test_ids_are_never_used_again_where_the_kernel_gives_such(path: Path) -> None:
    with open_file(path) as file:
        mount = mount_of(file)
    assert mount is not None
    kind, _, number = mount.id.partition(":")
    assert kind == "unique"
    assert int(number) >= 1 << 31


@pytest.mark.parametrize("name", LINES)
def test_trusts_local_file_systems_only(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with open_file(path) as file:
        other = "70 1 0:1 / /x rw - proc proc rw\n17 1 0:1 / /y rw - proc proc rw\n"
        with_proc(monkeypatch, "pos:\t0\nflags:\t02100000\nmnt_id:\t7\nino:\t5\n", other + LINES[name] + "\n")
        kind = "ext4" if name == "with space" else name
        mount = mount_of(file)
        assert mount is not None
        assert mount.file_system == kind
        assert on_trusted_file_system(file) == (kind in TRUSTED_FILE_SYSTEMS)
        assert on_trusted_file_system(file) == (name in {"ext4", "btrfs", "with space"})


@pytest.mark.parametrize(
    ("fdinfo", "mountinfo"),
    [("pos:\t0\n", LINES["ext4"]), ("mnt_id:\t8\n", LINES["ext4"]), ("mnt_id:\t7\n", "7 1 254:0 / / rw"), ("", "")],
)
def test_what_is_not_known_is_not_trusted(
    path: Path, monkeypatch: pytest.MonkeyPatch, fdinfo: str, mountinfo: str
) -> None:
    with open_file(path) as file:
        with_proc(monkeypatch, fdinfo, mountinfo)
        assert mount_of(file) is None
        assert not on_trusted_file_system(file)


def test_an_older_kernel_gives_an_id_that_may_come_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_unique_mount_id", lambda fd: None)
    with open_file(path) as file:
        with_proc(monkeypatch, "mnt_id:\t7\n", LINES["ext4"])
        assert mount_of(file) == Mount("reused:7", "ext4")


def test_no_proc(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(self))

    with open_file(path) as file:
        monkeypatch.setattr(Path, "read_text", missing)
        with pytest.raises(UnreadableContentError, match="mount is not known"):
            mount_of(file)


def test_the_boot_has_an_id() -> None:
    assert len(boot_id()) == 36
    assert boot_id() == boot_id()
