"""Content swapped while it is identified and loaded: what is loaded is what was hashed, or there is an error."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvprov.errors import ChangedContentError
from kvprov.identity import OpenCheckpoint, open_checkpoint, open_file
from kvprov.identity.mounts import on_trusted_file_system
from kvprov.identity.safetensors import read_header
from tests.identity import reference
from tests.identity.conftest import wait_until_settled
from tests.identity.support import WEIGHTS, Tensors, flipped, overwrite, packed, replace_file, write_checkpoint

OTHER = flipped(WEIGHTS, "model.layer.0.weight", 7)
A, B = packed(WEIGHTS), packed(OTHER)
SHARD = "model.safetensors"


def load(checkpoint: OpenCheckpoint) -> list[dict[str, object]]:
    """Load as an engine does, through the paths of the descriptors."""
    loaded: list[dict[str, object]] = []
    for path in checkpoint.fd_paths:
        with open_file(path) as file:
            for span in read_header(file):
                raw = file.read(span.start, span.end - span.start)
                loaded.append(
                    {"name": span.name, "dtype": span.dtype, "shape": list(span.shape), "data_hex": raw.hex()}
                )
    return loaded


def identity_of(loaded: list[dict[str, object]]) -> str:
    return f"tensors-v1-blake3:{reference.tensors_digest(loaded).hex()}"


def listed(tensors: Tensors) -> list[dict[str, object]]:
    return [{"name": n, "dtype": d, "shape": s, "data_hex": raw.hex()} for n, (d, s, raw) in tensors.items()]


@dataclass
class Attack:
    """Puts B where A was, and A back."""

    folder: Path
    times: tuple[int, int] = (0, 0)
    maps: list[mmap.mmap] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / SHARD

    def prepare(self) -> None:
        status = self.path.stat()
        self.times = (status.st_atime_ns, status.st_mtime_ns)

    def swap(self, data: bytes) -> None:
        raise NotImplementedError


class Replaced(Attack):
    def swap(self, data: bytes) -> None:
        replace_file(self.path, data)


class Moved(Attack):
    """A is put aside by rename and comes back as the same file."""

    def swap(self, data: bytes) -> None:
        aside = self.path.with_name("aside")
        if data == B:
            self.path.rename(aside)
            self.path.write_bytes(B)
        else:
            aside.replace(self.path)


class InPlace(Attack):
    def swap(self, data: bytes) -> None:
        overwrite(self.path, data)


class TimesPutBack(Attack):
    def swap(self, data: bytes) -> None:
        overwrite(self.path, data)
        os.utime(self.path, ns=self.times)


class FolderMoved(Attack):
    def swap(self, data: bytes) -> None:
        aside = self.folder.with_name("aside")
        if data == B:
            self.folder.rename(aside)
            write_checkpoint(self.folder, OTHER)
        else:
            self.folder.rename(self.folder.with_name("used"))
            aside.rename(self.folder)


class FolderLinked(Attack):
    """The folder is a link, as a publisher's `current` is, and leads elsewhere."""

    def prepare(self) -> None:
        real = self.folder.with_name("version-a")
        self.folder.rename(real)
        self.folder.symlink_to(real)
        write_checkpoint(self.folder.with_name("version-b"), OTHER)

    def swap(self, data: bytes) -> None:
        self.folder.unlink()
        self.folder.symlink_to(self.folder.with_name("version-b" if data == B else "version-a"))


class FileLinked(Attack):
    """The file is a link, as in the Hugging Face cache, and leads elsewhere."""

    def prepare(self) -> None:
        for name, data in (("blob-a", A), ("blob-b", B)):
            (self.folder / name).write_bytes(data)
        self.path.unlink()
        self.path.symlink_to("blob-a")

    def swap(self, data: bytes) -> None:
        self.path.unlink()
        self.path.symlink_to("blob-b" if data == B else "blob-a")


class Mapped(Attack):
    """B is written through a memory map whose pages were dirty before the file was opened, which leaves no time."""

    def prepare(self) -> None:
        with self.path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), len(A))
        mapped[:] = A
        self.maps.append(mapped)

    def swap(self, data: bytes) -> None:
        self.maps[0][:] = data


ATTACKS = [Replaced, Moved, InPlace, TimesPutBack, FolderMoved, FolderLinked, FileLinked, Mapped]
STEPS = ["opened", "hashing", "hashed", "loaded"]
INVISIBLE = (Replaced, FolderMoved, FolderLinked, FileLinked)
"""Attacks on the path alone: the descriptor still leads to A, so most of them need no error."""


class AtFirstBytes:
    """Acts in the middle of hashing: after the first tensor."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def start(self, total: int) -> None:
        pass

    def advance(self, count: int) -> None:
        if self._act is not None:
            act, self._act = self._act, None
            act()

    def stop(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def run(attack: Attack, swaps: dict[str, bytes]) -> tuple[str, str] | None:
    """Identify and load with swaps after some steps: the identity and that of what was loaded, None after an error."""

    def step(name: str) -> None:
        if name in swaps:
            attack.swap(swaps[name])

    try:
        with open_checkpoint(attack.folder) as checkpoint:
            step("opened")
            identity = checkpoint.identify(progress=AtFirstBytes(lambda: step("hashing"))).identity
            step("hashed")
            loaded = load(checkpoint)
            step("loaded")
            checkpoint.recheck()
    except ChangedContentError:
        return None
    return identity, identity_of(loaded)


@pytest.mark.parametrize("kind", ATTACKS)
def test_without_a_swap_there_is_no_error(folder: Path, kind: type[Attack]) -> None:
    attack = kind(folder)
    attack.prepare()
    outcome = run(attack, {})
    assert outcome == (identity_of(listed(WEIGHTS)),) * 2


@pytest.mark.parametrize("young", [True, False], ids=["young", "old"])
@pytest.mark.parametrize("kind", ATTACKS)
@pytest.mark.parametrize("step", STEPS)
def test_one_swap(folder: Path, kind: type[Attack], step: str, young: bool) -> None:
    attack = kind(folder)
    attack.prepare()
    if isinstance(attack, Mapped):
        with open_file(attack.path) as file:
            if not on_trusted_file_system(file):
                pytest.skip("writes through a memory map leave no time on this file system")
    if not young:
        wait_until_settled()
    outcome = run(attack, {step: B})
    if outcome is None:
        assert not isinstance(attack, FolderMoved | FolderLinked | FileLinked)
    else:
        identity, loaded = outcome
        assert identity == loaded
        # A mapped write before the first byte is hashed is simply the content.
        assert isinstance(attack, INVISIBLE) or (isinstance(attack, Mapped) and step == "opened")


@pytest.mark.parametrize("kind", ATTACKS)
@pytest.mark.parametrize(
    ("out", "back"), [(i, j) for n, i in enumerate(STEPS) for j in STEPS[n + 1 :]], ids=lambda step: str(step)
)
def test_there_and_back(folder: Path, kind: type[Attack], out: str, back: str) -> None:
    attack = kind(folder)
    attack.prepare()
    if isinstance(attack, Mapped):
        with open_file(attack.path) as file:
            if not on_trusted_file_system(file):
                pytest.skip("writes through a memory map leave no time on this file system")
    outcome = run(attack, {out: B, back: A})
    assert outcome is None or outcome[0] == outcome[1]
    if isinstance(attack, InPlace | TimesPutBack):
        assert outcome is None


def test_a_loader_that_used_the_path_would_be_deceived(folder: Path) -> None:
    """The control: the attack works on whoever opens twice."""
    with open_checkpoint(folder) as checkpoint:
        identity = checkpoint.identify().identity
        replace_file(folder / SHARD, B)
        assert load(checkpoint) == listed(WEIGHTS)
        with open_checkpoint(folder) as again:
            assert identity_of(load(again)) != identity


def test_a_write_in_the_tick_of_the_last_change_is_waited_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system whose clock ticks slowly, hashing starts only once a later write has another time."""
    slept: list[float] = []
    sleep = time.sleep

    def note(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", note)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.identify()
    assert sum(slept) > 0
    slept.clear()
    wait_until_settled()
    slept.clear()
    with open_checkpoint(folder) as checkpoint:
        checkpoint.identify()
    assert sum(slept) == 0
