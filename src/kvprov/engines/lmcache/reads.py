"""Entries that LMCache reads back shorter than they were written.

LMCache 0.5.6 reads a file into memory that held another entry before. Where the file is shorter, the rest of that
memory stays, which may be another tenant's state. A store may lose or cut entries, so such an entry is taken for
missing, as one is whose file is gone.
"""

from __future__ import annotations

import os
from typing import Any

from kvprov.engines.vllm.log import logger


def guard(storage_manager: Any, chunk_tokens: int | None) -> None:
    """Let the backends of one LMCache engine give whole entries only.

    Args:
        storage_manager: The engine's.
        chunk_tokens: How many tokens every entry holds; None where the last one of a prompt may hold fewer.
    """
    if chunk_tokens is not None:
        _guard_sizes(storage_manager, chunk_tokens)
    for backend in storage_manager.storage_backends.values():
        disk = getattr(backend, "real_backend", backend)
        if type(disk).__name__ == "LocalDiskBackend":
            _guard_disk(disk)


def _guard_sizes(storage_manager: Any, chunk_tokens: int) -> None:
    native = storage_manager.batched_get

    def batched_get(*args: Any, **kwargs: Any) -> Any:
        entries = list(native(*args, **kwargs))
        for index, entry in enumerate(entries):
            if entry is not None and entry.get_num_tokens() != chunk_tokens:
                logger.warning("kvprov: an entry holds fewer tokens than a chunk has. It is not used.")
                entry.ref_count_down()
                entries[index] = None
        return entries

    storage_manager.batched_get = batched_get


def _guard_disk(backend: Any) -> None:
    native = backend.read_file

    def read_file(key: Any, buffer: Any, path: str) -> Any:
        if os.path.exists(path) and (found := os.path.getsize(path)) != len(buffer):  # noqa: PTH110, PTH202
            with backend.disk_lock:
                backend.dict.pop(key, None)
            raise OSError(f"{path} holds {found} bytes, not the {len(buffer)} that were written")
        return native(key, buffer, path)

    def get_blocking(key: Any) -> Any:
        # Like the reading of several entries at once, which counts a failed one as missing; LMCache's own reading of
        # one ends the engine.
        with backend.disk_lock:
            entry = backend.dict.get(key)
        if entry is None:
            return None
        memory = backend.local_cpu_backend.allocate(entry.shape, entry.dtype, entry.fmt)
        return backend._load_chunk_into_memory(key, entry.path, memory)

    backend.read_file = read_file
    backend.get_blocking = get_blocking
