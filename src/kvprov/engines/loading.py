"""The identity of weights that an engine loads, whatever happens to their files meanwhile.

The loader is handed the very files that are hashed: each is opened once, hashed through that descriptor, and passed on
as `/proc/self/fd/N`, so that a file, a link or a folder swapped at the path is not seen. What is left is a write into
the open file itself, which `OpenCheckpoint.recheck` finds after the load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvprov.contract.errors import KvprovError
from kvprov.identity.checkpoint import OpenCheckpoint, combined_identity, open_files
from kvprov.identity.digest_cache import default_cache
from kvprov.identity.tensors import Tensor

_current = threading.local()


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What is known of a model's weights.

    Attributes:
        identity: The identity of the tensors that were read, or None.
        reason: Why there is none.
        tensors: These tensors.
    """

    identity: str | None
    reason: str = ""
    tensors: tuple[Tensor, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors."""
        return frozenset(tensor.name for tensor in self.tensors)


class Recorder:
    """Follows one model's load.

    Attributes:
        prefix: Stands before the names of the tensors in the files that are read next.
        reason: Why what is loaded has no identity; empty as long as it may have one.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self.parts: list[OpenCheckpoint] = []
        self.reason = ""

    def pin(self, files: list[str]) -> list[str]:
        """Open `files` and return the paths under which the loader shall read them."""
        try:
            part = open_files(files, prefix=self.prefix)
            self.parts.append(part)
            for file in part.files:
                # Before the load, not only before the hashing: a write in between would not show in the stamp if it
                # fell in one tick of the clock with the last one, or went through a memory map with dirty pages.
                file.settle()
        except KvprovError as error:
            self.reason = error.message
            return files
        return part.fd_paths

    def finish(self) -> LoadedWeights:
        """Return what was loaded since the recorder was made."""
        if self.reason:
            return LoadedWeights(None, self.reason)
        if not self.parts:
            return LoadedWeights(None, "no safetensors files were read")
        try:
            identified = combined_identity(self.parts, cache=default_cache())
            for part in self.parts:
                part.recheck()
            tensors = tuple(tensor for part in self.parts for tensor in part.tensors())
        except KvprovError as error:
            return LoadedWeights(None, error.message)
        return LoadedWeights(identified.identity, tensors=tensors)

    def close(self) -> None:
        """Close the files."""
        for part in self.parts:
            part.close()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Give a recorder for what this thread loads until the block ends."""
    outer = getattr(_current, "recorder", None)
    recorder = Recorder()
    _current.recorder = recorder
    try:
        yield recorder
    finally:
        _current.recorder = outer
        recorder.close()


def recorder() -> Recorder | None:
    """Return the recorder of this thread's load, or None when none is followed."""
    current: Recorder | None = getattr(_current, "recorder", None)
    return current


def wrap_safetensors_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an iterator over safetensors files that reads the files which are hashed."""

    def safetensors_iterator(hf_weights_files: list[str], *args: Any, **kwargs: Any) -> Any:
        current = recorder()
        files = hf_weights_files if current is None else current.pin(hf_weights_files)
        return original(files, *args, **kwargs)

    return safetensors_iterator


def wrap_pickle_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an iterator over pickled files that notes why their content has no identity."""

    def pickle_iterator(*args: Any, **kwargs: Any) -> Any:
        current = recorder()
        if current is not None:
            current.reason = "the weights are pickled files, which kvprov never reads"
        return original(*args, **kwargs)

    return pickle_iterator
