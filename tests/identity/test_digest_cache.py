from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvprov.identity.checkpoint as checkpoint_module
import kvprov.identity.digest_cache as module
from kvprov.identity import (
    DigestCache,
    Identified,
    OpenFile,
    Tensor,
    default_cache,
    hash_file,
    identify_checkpoint,
    open_file,
)
from kvprov.identity.mounts import Mount
from tests.identity.conftest import SETTLE_NS, wait_until_settled
from tests.identity.support import WEIGHTS, flipped, packed, replace_file, write_checkpoint

SHARD = "model.safetensors"


def everything(_: OpenFile) -> bool:
    return True


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache/digests", trusts=everything)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "model")
    wait_until_settled()
    return folder


def entries(cache: DigestCache) -> list[Path]:
    return sorted(cache.folder.glob("*.json"))


def primed(cache: DigestCache, folder: Path) -> Identified:
    """Fill the cache, and show that it hits: else the misses below would show nothing."""
    first = identify_checkpoint(folder, cache=cache)
    assert not first.cached
    again = identify_checkpoint(folder, cache=cache)
    assert again.cached
    assert again.identity == first.identity
    assert again.tensors == first.tensors
    return first


def test_an_unchanged_file_is_hashed_once(cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = primed(cache, folder)
    monkeypatch.setattr(checkpoint_module, "hash_file", None)
    assert identify_checkpoint(folder, cache=DigestCache(cache.folder, trusts=everything)).identity == first.identity
    (folder / SHARD).read_bytes()


def test_reading_does_not_miss_and_a_shard_counts_alone(cache: DigestCache, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "sharded", shards=2)
    wait_until_settled()
    primed(cache, folder)
    assert len(entries(cache)) == 2
    shard = folder / "model-00001-of-00002.safetensors"
    shard.read_bytes()
    assert identify_checkpoint(folder, cache=cache).cached
    shard.touch()
    wait_until_settled()
    hashed: list[Path] = []
    real = hash_file

    def note(file: OpenFile, *args: object) -> tuple[Tensor, ...]:
        hashed.append(file.path)
        return real(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "hash_file", note)
        assert not identify_checkpoint(folder, cache=cache).cached
    assert hashed == [shard]


OTHER = packed(flipped(WEIGHTS, "model.norm.bias"))


def put_back(path: Path) -> None:
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(OTHER)
    os.utime(path, ns=times)


CHANGES: dict[str, Callable[[Path], object]] = {
    "chmod": lambda path: path.chmod(0o640),
    "touch": Path.touch,
    "older": lambda path: os.utime(path, (0, 0)),
    "replaced": lambda path: replace_file(path, OTHER),
    "replaced by the same": lambda path: replace_file(path, path.read_bytes()),
    "written": lambda path: path.write_bytes(OTHER),
    "written, time put back": put_back,
    "linked elsewhere": lambda path: (path.with_name("b").write_bytes(OTHER), path.unlink(), path.symlink_to("b")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_hashed_again(cache: DigestCache, folder: Path, change: str) -> None:
    first = primed(cache, folder)
    CHANGES[change](folder / SHARD)
    wait_until_settled()
    found = identify_checkpoint(folder, cache=cache)
    assert not found.cached
    assert found.identity == identify_checkpoint(folder).identity
    same = change in {"chmod", "touch", "older", "replaced by the same"}
    assert (found.identity == first.identity) == same
    assert identify_checkpoint(folder, cache=cache).cached


def test_a_young_file_is_neither_trusted_nor_remembered(cache: DigestCache, folder: Path) -> None:
    path = folder / SHARD
    tensors = (Tensor("wrong", "U8", (1,), bytes(32)),)
    with open_file(path) as file:
        cache.put(file, tensors)
        assert cache.get(file) == tensors
    path.touch()
    with open_file(path) as file:
        assert not file.stamp.settled(time.time_ns())
        cache.put(file, tensors)
        assert cache.get(file) is None
    wait_until_settled()
    with open_file(path) as file:
        assert cache.get(file) is None
        cache.put(file, tensors)
        assert cache.get(file) == tensors


def test_a_file_from_the_future_is_not_remembered(cache: DigestCache, folder: Path) -> None:
    ahead = time.time_ns() + 3600 * 10**9
    os.utime(folder / SHARD, ns=(ahead, ahead))
    wait_until_settled()
    for _ in range(2):
        assert not identify_checkpoint(folder, cache=cache).cached
    assert entries(cache) == []


def test_files_on_other_file_systems_are_not_remembered(cache: DigestCache, folder: Path) -> None:
    primed(cache, folder)
    distrustful = DigestCache(cache.folder, trusts=lambda file: False)
    assert not identify_checkpoint(folder, cache=distrustful).cached


@pytest.mark.parametrize("what", ["boot", "mount", "no mount"])
def test_another_boot_or_mount_misses(
    cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    primed(cache, folder)
    if what == "boot":
        monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    else:
        mount = Mount("unique:1", "ext4") if what == "mount" else None
        monkeypatch.setattr(module, "mount_of", lambda file: mount)
    assert not identify_checkpoint(folder, cache=cache).cached


def _forged(raw: bytes) -> bytes:
    return raw.replace(b"model.norm.bias", b"model.norm.bigs")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "truncated": lambda raw: raw[: len(raw) // 2],
    "longer": lambda raw: raw + b" ",
    "a flipped bit": lambda raw: raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:],
    "no checksum": lambda raw: raw.partition(b"\n")[2],
    "changed under its checksum": _forged,
    "not JSON": lambda raw: _signed(b"{"),
    "deep JSON": lambda raw: _signed(b"[" * 100_000),
    "not UTF-8": lambda raw: _signed(b"\xff"),
    "a list": lambda raw: _signed(b"[]"),
    "another key": lambda raw: _signed(raw.partition(b"\n")[2].replace(b"kvprov-digests/1", b"kvprov-digests/0")),
    "no tensors": lambda raw: _signed(raw.partition(b"\n")[2].replace(b'"tensors"', b'"vectors"')),
    "unknown dtype": lambda raw: _signed(raw.partition(b"\n")[2].replace(b'"BF16"', b'"BF61"')),
    "negative shape": lambda raw: _signed(raw.partition(b"\n")[2].replace(b"[4, 8]", b"[4,-8]")),
    "text for a shape": lambda raw: _signed(raw.partition(b"\n")[2].replace(b"[4, 8]", b'"4,8"')),
}


def _signed(body: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_ignored_and_written_anew(cache: DigestCache, folder: Path, damage: str) -> None:
    first = primed(cache, folder)
    (entry,) = entries(cache)
    good = entry.read_bytes()
    damaged = DAMAGE[damage](good)
    assert damaged != good
    entry.write_bytes(damaged)
    found = identify_checkpoint(folder, cache=cache)
    assert not found.cached
    assert found.identity == first.identity
    assert entry.read_bytes() == good
    assert identify_checkpoint(folder, cache=cache).cached


def test_an_entry_of_another_file_is_ignored(cache: DigestCache, tmp_path: Path) -> None:
    a, b = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b", flipped(WEIGHTS, "model.norm.bias"))
    wait_until_settled()
    first = primed(cache, a)
    (entry_a,) = entries(cache)
    primed(cache, b)
    (entry_b,) = set(entries(cache)) - {entry_a}
    entry_a.write_bytes(entry_b.read_bytes())
    assert identify_checkpoint(a, cache=cache).identity == first.identity


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "writable"])
@pytest.mark.timeout(20)
def test_an_entry_that_is_no_private_file_is_ignored(cache: DigestCache, folder: Path, kind: str) -> None:
    first = primed(cache, folder)
    (entry,) = entries(cache)
    if kind == "writable":
        entry.chmod(0o666)
    else:
        aside = entry.rename(entry.with_name("aside"))
        make = {"folder": entry.mkdir, "fifo": lambda: os.mkfifo(entry), "link": lambda: entry.symlink_to(aside)}
        make[kind]()
    found = identify_checkpoint(folder, cache=cache)
    assert not found.cached
    assert found.identity == first.identity
    assert identify_checkpoint(folder, cache=cache).cached == (kind != "folder")


class TestFolder:
    def test_is_private(self, cache: DigestCache, folder: Path) -> None:
        primed(cache, folder)
        assert cache.folder.stat().st_mode & 0o777 == 0o700
        assert {entry.stat().st_mode & 0o777 for entry in entries(cache)} == {0o600}

    @pytest.mark.parametrize("mode", [0o770, 0o720, 0o707, 0o777])
    def test_writable_by_others(
        self, cache: DigestCache, folder: Path, mode: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        primed(cache, folder)
        cache.folder.chmod(mode)
        self.refused(cache, folder, caplog, "other users may write")
        cache.folder.chmod(0o755)
        assert identify_checkpoint(folder, cache=cache).cached

    def test_of_another_user(
        self, cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        primed(cache, folder)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        self.refused(cache, folder, caplog, f"belongs to user {user}")

    def test_a_link(self, cache: DigestCache, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        primed(cache, folder)
        real = cache.folder.rename(cache.folder.with_name("real"))
        cache.folder.symlink_to(real)
        self.refused(cache, folder, caplog, "symbolic link")

    def test_a_file(self, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file/below", Path("/proc/nowhere"), tmp_path / "a\0b"):
            caplog.clear()
            self.refused(DigestCache(path, trusts=everything), folder, caplog, "cannot be opened")

    def test_a_full_disk(
        self, cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        primed(cache, folder)
        (folder / SHARD).touch()
        wait_until_settled()

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        self.refused(cache, folder, caplog, "No space left")
        assert [path.name for path in cache.folder.iterdir() if path.name.startswith(".")] == []

    @staticmethod
    def refused(cache: DigestCache, folder: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
        caplog.set_level(logging.WARNING)
        expected = identify_checkpoint(folder).identity
        for _ in range(2):
            found = identify_checkpoint(folder, cache=cache)
            assert not found.cached
            assert found.identity == expected
        assert len(caplog.records) == 1
        assert reason in caplog.text


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "cache", trusts=everything, max_entries=3)
    files = [write_checkpoint(tmp_path / f"m{i}") / SHARD for i in range(5)]
    wait_until_settled()
    stale, fresh = cache.folder / ".x.json.1.1", cache.folder / ".y.json.1.1"
    for i, path in enumerate(files):
        with open_file(path) as file:
            cache.put(file, hash_file(file))
            assert cache.get(file) is not None
        for entry in entries(cache):
            # Older with every round, so that the order does not hang on the clock.
            os.utime(entry, ns=(0, entry.stat().st_mtime_ns - 10**9))
        if i == 0:
            stale.touch()
            os.utime(stale, (0, 0))
            fresh.touch()
    assert len(entries(cache)) == 3
    assert (stale.exists(), fresh.exists()) == (False, True)
    found = []
    for path in files:
        with open_file(path) as file:
            found.append(cache.get(file) is not None)
    assert found == [False, False, True, True, True]


def _identify(folder: Path, cache_folder: Path, barrier: object, results: object) -> None:
    import kvprov.identity.files as files

    files.SETTLE_NS = SETTLE_NS  # type: ignore[misc]
    hashed = 0
    real = hash_file

    def counted(file: OpenFile, *args: object) -> tuple[Tensor, ...]:
        nonlocal hashed
        hashed += 1
        time.sleep(0.2)
        return real(file)

    checkpoint_module.hash_file = counted
    cache = DigestCache(cache_folder, trusts=everything)
    barrier.wait()  # type: ignore[attr-defined]
    found = identify_checkpoint(folder, cache=cache)
    results.put((found.identity, hashed))  # type: ignore[attr-defined]


@pytest.mark.timeout(60)
def test_processes_share_a_folder_and_hash_a_file_once(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    expected = identify_checkpoint(folder).identity
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_identify, args=(folder, tmp_path / "cache", barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert {identity for identity, _ in found} == {expected}
    assert sum(hashed for _, hashed in found) == 3
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert sum(name.endswith(".json") for name in names) == 3
    assert [name for name in names if name.startswith(".")] == []


def test_a_lock_that_is_never_released_is_not_waited_for_forever(
    cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.2)
    with open_file(folder / SHARD) as file, cache.lock(file), cache.lock(file):
        assert cache.get(file) is None


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPROV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache().folder == tmp_path / "xdg/kvprov/digests"
    monkeypatch.setenv("KVPROV_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_cache().folder == tmp_path / "chosen/digests"
