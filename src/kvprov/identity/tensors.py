"""`kv-tensors/1`: one digest of named tensors, whatever files hold them and in which order."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvprov.contract.encoding import lp, u32, u64
from kvprov.errors import KvprovError
from kvprov.identity.files import OpenFile
from kvprov.identity.safetensors import MAX_HEADER_BYTES, read_header

TENSORS: Final = "kv-tensors/1"
SCHEME: Final = "tensors-v1-blake3"
DIGEST_BYTES: Final = 32

_CHUNK_BYTES: Final = 64 << 20
_THREADED_BYTES: Final = 1 << 20
"""Below this many bytes, waking the other cores costs more than they save."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's content.

    Attributes:
        name: Its name in the checkpoint.
        dtype: As safetensors names it, for instance `BF16`.
        shape: Elements along each axis.
        digest: BLAKE3-256 of its data, 32 bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def tensors_digest(tensors: Iterable[Tensor]) -> bytes:
    """Return the digest of `tensors`, in any order: 32 bytes.

    BLAKE3-256 of `lp("kv-tensors/1") || u64(count)` and then, for each tensor by its name's UTF-8 bytes,
    `lp(name) || lp(dtype) || u32(rank) || u64(each dim) || BLAKE3-256(data)`. Source: the specification, section on
    content identities.

    Raises:
        KvprovError: a name occurs twice or is no Unicode text, a dimension is not below 2**64, or a digest has not
            32 bytes.
    """
    from blake3 import blake3

    by_name: dict[bytes, bytes] = {}
    for tensor in tensors:
        try:
            name = tensor.name.encode()
            entry = lp(name) + lp(tensor.dtype) + u32(len(tensor.shape)) + b"".join(map(u64, tensor.shape))
        except (UnicodeEncodeError, OverflowError) as error:
            raise KvprovError(
                f"The tensor {tensor.name[:80]!r} of shape {tensor.shape} has no encoding.",
                "Use Unicode names, and dimensions from 0 to 2**64-1.",
            ) from error
        if len(tensor.digest) != DIGEST_BYTES:
            raise KvprovError(
                f"The digest of tensor {tensor.name[:80]!r} has {len(tensor.digest)} bytes.",
                f"Give the whole BLAKE3-256 digest, {DIGEST_BYTES} bytes.",
            )
        if name in by_name:
            raise KvprovError(
                f"The tensor {tensor.name[:80]!r} occurs twice.",
                "Remove one of the two: which of them an engine would load is not certain.",
            )
        by_name[name] = entry + tensor.digest
    state = blake3(lp(TENSORS) + u64(len(by_name)))
    for name in sorted(by_name):
        state.update(by_name[name])
    return state.digest()


def tensors_identity(digest: bytes) -> str:
    """Return the identity `tensors-v1-blake3:` and the hex of `digest`, which `tensors_digest` gave."""
    return f"{SCHEME}:{digest.hex()}"


def _ignore(_: int) -> None:
    pass


_Read = Callable[[int, int], memoryview]


@contextmanager
def _mapped(file: OpenFile) -> Iterator[_Read]:
    """Give the file's bytes from a memory map, and release each page once the next bytes are asked for."""
    mapped = file.map()
    if isinstance(mapped, memoryview):
        yield lambda start, end: mapped[start:end]
        return
    with mapped, memoryview(mapped) as view:
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        given: list[tuple[int, memoryview]] = []

        def release() -> None:
            while given:
                start, chunk = given.pop()
                end = start + len(chunk)
                chunk.release()
                first = start - start % mmap.PAGESIZE
                # Without this the whole checkpoint would count as this process's resident memory.
                if end > first:
                    mapped.madvise(mmap.MADV_DONTNEED, first, end - first)

        def read(start: int, end: int) -> memoryview:
            release()
            chunk = view[start:end]
            given.append((start, chunk))
            return chunk

        try:
            yield read
        finally:
            release()


@contextmanager
def _copied(file: OpenFile) -> Iterator[_Read]:
    """Give the file's bytes from a buffer that they are read into, valid until the next bytes are asked for."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, file.stamp.size)))

    def read(start: int, end: int) -> memoryview:
        chunk = buffer[: end - start]
        file.read_into(chunk, start)
        return chunk

    yield read


def hash_file(
    file: OpenFile,
    progress: Callable[[int], None] = _ignore,
    *,
    mapped: bool = True,
    header_limit: int = MAX_HEADER_BYTES,
) -> tuple[Tensor, ...]:
    """Return the tensors of a safetensors file, in the order of their data, hashed on all cores.

    Args:
        file: The file.
        progress: Called with the number of bytes hashed since the call before.
        mapped: Whether to hash a memory map of the file, at memory speed and without a copy. A map is for files
            that only trusted users write to: if one is truncated while it is hashed, the kernel ends the process
            (SIGBUS), which no check before or after can rule out. Otherwise the bytes are read into a buffer.
        header_limit: Most bytes that the file's header may have.

    Raises:
        UnreadableContentError: the file is no well-formed safetensors file, or cannot be read.
        ChangedContentError: the file changed since it was opened.
    """
    from blake3 import blake3

    spans = read_header(file, header_limit)
    tensors = []
    # The spans were checked against the stamp's size; a file that was truncated since must not be mapped.
    file.recheck()
    with (_mapped if mapped else _copied)(file) as read:
        for span in spans:
            threads = blake3.AUTO if span.end - span.start >= _THREADED_BYTES else 1
            state = blake3(max_threads=threads)
            for start in range(span.start, span.end, _CHUNK_BYTES):
                chunk = read(start, min(start + _CHUNK_BYTES, span.end))
                state.update(chunk)
                progress(len(chunk))
            tensors.append(Tensor(span.name, span.dtype, span.shape, state.digest()))
    file.recheck()
    return tuple(tensors)
