"""The identity of a LoRA adapter, and private copies of adapters that tenants can change at any time."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvprov.contract.encoding import lp
from kvprov.errors import ChangedContentError, KvprovError, UnidentifiableError, UnreadableContentError
from kvprov.identity.adapter_config import RESERVED, checked_config, effective_config
from kvprov.identity.canonical import canonical_json
from kvprov.identity.checkpoint import Identified
from kvprov.identity.files import OpenFile, Stamp, open_file, unreadable
from kvprov.identity.progress import Progress, SilentProgress
from kvprov.identity.strict_json import parse_object
from kvprov.identity.tensors import DIGEST_BYTES, hash_file, tensors_digest

ADAPTER: Final = "kv-adapter/1"
SCHEME: Final = "adapter-v1-blake3"

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"

MAX_CONFIG_BYTES: Final = 8 << 20
MAX_HEADER_BYTES: Final = 32 << 20
"""Twice what an adapter of 256 experts in each of 60 layers needs."""
MAX_ADAPTER_BYTES: Final = 32 << 30
"""Most bytes that a private copy may have: a file with holes costs its tenant nothing, and its copy a disk."""

_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt")
_COPY_BYTES: Final = 16 << 20


def adapter_identity(
    tensors_digest: bytes,
    config: Mapping[str, object],
    *,
    extra: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
) -> str:
    """Return an adapter's identity: `adapter-v1-blake3:` and hex.

    BLAKE3-256 of `lp("kv-adapter/1") || tensors_digest || lp(RFC 8785 JSON of the effective configuration)`. Source:
    the specification, section on content identities.

    Args:
        tensors_digest: `kv-tensors/1` of the adapter's tensors, 32 bytes.
        config: `adapter_config.json`; see `effective_config` for what of it counts.
        extra: Facts of the engine that shape how it applies the adapter, as the field `kvprov:engine`; none and an
            empty map are one.
        files: Identities of further files of the adapter that the engine reads, by name, as `kvprov:files`.

    Raises:
        KvprovError: the digest has not 32 bytes, or the configuration has no canonical form.
    """
    return _identity(tensors_digest, effective_config(config), extra or {}, files or {})


def _identity(
    digest: bytes, effective: Mapping[str, object], extra: Mapping[str, object], files: Mapping[str, str]
) -> str:
    from blake3 import blake3

    if len(digest) != DIGEST_BYTES:
        raise KvprovError(f"The tensors' digest has {len(digest)} bytes.", f"Give all {DIGEST_BYTES} bytes of it.")
    bound = dict(effective)
    if extra:
        bound[f"{RESERVED}engine"] = dict(extra)
    if files:
        bound[f"{RESERVED}files"] = dict(files)
    return f"{SCHEME}:{blake3(lp(ADAPTER) + digest + lp(canonical_json(bound))).hexdigest()}"


class _OpenAdapter:
    """An adapter's files, opened once."""

    def __init__(self, folder: Path, also: Sequence[str], stack: ExitStack) -> None:
        self.folder = folder
        # Opened in any case, so that a missing folder and a missing file have errors of their own.
        try:
            names = set(os.listdir(folder))  # noqa: PTH208 - names only
        except OSError as error:
            raise unreadable(folder, error) from error
        if TENSORS_FILE not in names:
            pickled = [name for name in _PICKLES if name in names]
            raise UnidentifiableError(
                folder,
                f"it holds no {TENSORS_FILE}" + (f", only {pickled[0]}, which is never unpickled" if pickled else ""),
                "Save the adapter with safe_serialization=True.",
            )
        self.config = stack.enter_context(open_file(folder / CONFIG_FILE))
        self.tensors = stack.enter_context(open_file(folder / TENSORS_FILE))
        self.also = tuple(stack.enter_context(open_file(folder / name)) for name in sorted(set(also) & names))

    @property
    def files(self) -> tuple[OpenFile, ...]:
        return (self.config, self.tensors, *self.also)

    def identify(self, extra: Mapping[str, object], progress: Progress) -> Identified:
        began = time.perf_counter()
        config = parse_object(self.config.read_all(MAX_CONFIG_BYTES), self.config.path)
        effective = checked_config(config, self.config.path)
        progress.start(self.tensors.stamp.size)
        try:
            # Read, not mapped: a tenant who truncates a mapped file kills the engine.
            tensors = hash_file(self.tensors, progress.advance, mapped=False, header_limit=MAX_HEADER_BYTES)
            files = {file.path.name: _file_identity(file) for file in self.also}
        finally:
            progress.stop()
        for file in self.files:
            file.recheck()
        return Identified(
            identity=_identity(tensors_digest(tensors), effective, extra, files),
            bytes=sum(file.stamp.size for file in self.files),
            tensors=len(tensors),
            seconds=time.perf_counter() - began,
            files=tuple(file.path.name for file in self.files),
            cached=False,
        )


def _file_identity(file: OpenFile) -> str:
    if file.path.suffix == ".safetensors":
        tensors = hash_file(file, mapped=False, header_limit=MAX_HEADER_BYTES)
        return f"tensors-v1-blake3:{tensors_digest(tensors).hex()}"
    from blake3 import blake3

    return f"blake3:{blake3(file.read_all(MAX_CONFIG_BYTES)).hexdigest()}"


def identify_adapter(folder: str | Path, *, progress: Progress | None = None) -> Identified:
    """Return the identity of a PEFT adapter as it is now: of the bytes read, each of them once.

    For reports. An engine that loads the adapter needs `pin_adapter`: a tenant may change the files between this
    and the load, through a memory map even without a trace.

    Args:
        folder: Holds `adapter_config.json` and `adapter_model.safetensors`.
        progress: What is told how far hashing has come.

    Raises:
        UnidentifiableError: the folder has no `adapter_model.safetensors`. Pickles are never read.
        UnreadableContentError: the folder or a file cannot be read or is broken.
        ChangedContentError: a file changed meanwhile.
    """
    with ExitStack() as stack:
        return _OpenAdapter(Path(folder), (), stack).identify({}, progress or SilentProgress())


@dataclass(frozen=True, slots=True)
class Pinned:
    """A private copy of an adapter, and its identity.

    Attributes:
        identity: Of the copy: `adapter-v1-blake3:` and hex.
        folder: The copy. The engine loads from here.
        stamps: The original's folder and files, each with its stamp when it was copied.
        settled: Whether these stamps were old enough then for later changes to show in them.
    """

    identity: str
    folder: Path
    stamps: tuple[tuple[Path, Stamp], ...]
    settled: bool


def _check_private(into: Path) -> None:
    try:
        status = os.lstat(into)
    except OSError as error:
        raise unreadable(into, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise KvprovError(f"{into} is not a folder.", "Name a folder for private copies of adapters.")
    if status.st_uid != os.geteuid():
        raise KvprovError(
            f"The folder {into} belongs to user {status.st_uid}, not to this one.",
            "Name a folder that belongs to the engine's user.",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KvprovError(f"Other users may write to the folder {into}.", f"Run: chmod go-w {into}")


def _copy(source: OpenFile, target: Path) -> None:
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb", buffering=0) as copy:
            buffer = memoryview(bytearray(min(_COPY_BYTES, source.stamp.size)))
            for start in range(0, source.stamp.size, _COPY_BYTES):
                chunk = buffer[: min(_COPY_BYTES, source.stamp.size - start)]
                source.read_into(chunk, start)
                while len(chunk):
                    chunk = chunk[copy.write(chunk) or 0 :]
    except OSError as error:
        raise KvprovError(
            f"The adapter's file {source.path} cannot be copied to {target.parent}: {error.strerror or error}.",
            "Make room there, or name another folder for private copies of adapters.",
        ) from error


def pin_adapter(
    folder: str | Path,
    into: Path,
    extra: Mapping[str, object] | None = None,
    *,
    also: Sequence[str] = (),
    max_bytes: int = MAX_ADAPTER_BYTES,
) -> Pinned:
    """Copy an adapter into a new private folder, and return the identity of the copy.

    Identity and load then see the same bytes, whatever happens to the original. The copy holds exactly what the
    identity covers: `adapter_config.json`, `adapter_model.safetensors` and the files that `also` names; never a pickle.

    Args:
        folder: The adapter.
        into: An existing folder of this user's, in which nobody else may write.
        extra: Facts of the engine that shape how it applies the adapter, such as `{"is_3d_lora_weight": True}`.
        also: Names of further files that the engine reads when they are there, such as `new_embeddings.safetensors`.
        max_bytes: Most bytes that the copy may have.

    Raises:
        UnidentifiableError: the folder has no `adapter_model.safetensors`.
        UnreadableContentError: the folder or a file cannot be read or is broken.
        ChangedContentError: the original changed while it was copied.
        KvprovError: `into` is not private, the adapter is too large, or the copy cannot be written.
    """
    import shutil
    import tempfile

    folder = Path(folder).absolute()
    for name in also:
        if name in {"", ".", "..", CONFIG_FILE, TENSORS_FILE} or "/" in name or Path(name).suffix in (".bin", ".pt"):
            raise KvprovError(f"{name!r} cannot be copied with an adapter.", "Name a further file directly in it.")
    _check_private(into)
    try:
        private = Path(tempfile.mkdtemp(prefix="adapter-", dir=into))
    except OSError as error:
        raise KvprovError(f"No folder can be made in {into}: {error.strerror or error}.", "Make room there.") from error
    try:
        stamps, settled = _copy_adapter(folder, private, also, max_bytes)
        with ExitStack() as stack:
            identity = _OpenAdapter(private, also, stack).identify(extra or {}, SilentProgress()).identity
    except (UnreadableContentError, UnidentifiableError) as error:
        shutil.rmtree(private)
        if error.path.is_relative_to(private):
            # The copy is gone: what people can look at is the original.
            original = folder / error.path.relative_to(private)
            raise type(error)(original, error.reason, error.advice) from error
        raise
    except BaseException:
        shutil.rmtree(private)
        raise
    return Pinned(identity, private, stamps, settled)


def _copy_adapter(
    folder: Path, private: Path, also: Sequence[str], max_bytes: int
) -> tuple[tuple[tuple[Path, Stamp], ...], bool]:
    """Copy the files, and return the stamps of all sources and whether these are old enough to show later changes."""
    with ExitStack() as stack:
        stamps = [(folder, _stamp(folder))]
        original = _OpenAdapter(folder, also, stack)
        size = sum(file.stamp.size for file in original.files)
        if size > max_bytes:
            raise UnreadableContentError(
                folder, f"it has {size} bytes, more than {max_bytes}", "Check that it is an adapter."
            )
        for file in original.files:
            _copy(file, private / file.path.name)
            stamps.append((file.path, file.stamp))
        copied_at = time.time_ns()
        # By path, which also shows that the files all came from this one folder.
        for path, stamp in stamps:
            if _stamp(path) != stamp:
                raise ChangedContentError(path, "it changed while it was copied", "Try again once it is complete.")
        return tuple(stamps), all(stamp.settled(copied_at) for _, stamp in stamps)


def _stamp(path: Path) -> Stamp:
    try:
        return Stamp.of(path)
    except OSError as error:
        raise unreadable(path, error) from error


def sources_unchanged(pinned: Pinned) -> bool:
    """Say whether the original is surely still what was copied, by stamps alone: a few microseconds.

    False asks for a new pin, and is no error: it is also the answer for an original that was changed less than 2 s
    before it was copied, since a change within the same tick of the clock would not show. A true answer may be wrong
    about a tenant who writes through a memory map; the copy then stays in use, under its own identity.
    """
    if not pinned.settled:
        return False
    for path, stamp in pinned.stamps:
        try:
            if Stamp.of(path) != stamp:
                return False
        except OSError:
            return False
    return True


def unpin_adapter(pinned: Pinned) -> None:
    """Remove a private copy that no engine loads from any more.

    Raises:
        KvprovError: it cannot be removed.
    """
    import shutil

    try:
        shutil.rmtree(pinned.folder)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror or error
        raise KvprovError(f"The copy {pinned.folder} cannot be removed: {reason}.", "Remove it by hand.") from error
