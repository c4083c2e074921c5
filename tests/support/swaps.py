"""Exchanges a checkpoint at its path while an engine is loading it."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "model.safetensors"

LISTED, OPENED, HALF_READ, READ, LOADED, HASHED = (
    "listed",
    "opened",
    "half read",
    "read",
    "loaded",
    "hashed",
)
"""When a loader has listed the files, when kvprov has opened them, after half of the tensors, after the last one, when
the model has its weights, and when kvprov has hashed the files but not yet looked whether they changed."""

RENAME, IN_PLACE, MAP, FOLDER, LINK = ("rename", "in place", "map", "folder", "link")
"""By renaming a file over the other, by writing into the file and setting its times back, by writing through a memory
map whose pages are dirty already (which leaves the times as they are), by exchanging the folder above, and by switching
the link that leads to it."""


def content(model: str) -> str:
    """Return a hash of what the path of a model holds."""
    return hashlib.sha256((Path(model) / FILE).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Swaps:
    """Exchanges one of two checkpoints for the other, each time that the load passes a point.

    Attributes:
        method: How.
        at: When, in order.
        model: The path that the engine loads: a folder, or a link to one.
        one: A folder with the checkpoint that is there at first.
        two: A folder with the other.
    """

    method: str
    at: tuple[str, ...]
    model: str
    one: str
    two: str
    done: list[str] = field(default_factory=list)
    maps: list[mmap.mmap] = field(default_factory=list)

    def prepare(self) -> None:
        """Put the first checkpoint at the path."""
        target = self.one
        if self.method == LINK:
            Path(self.model).symlink_to(target)
        else:
            shutil.copytree(target, self.model)

    def __call__(self) -> None:
        """Wait for the points, in the process of the engine that will load."""
        if self.method == MAP:
            with (Path(self.model) / FILE).open("r+b") as file:
                self.maps.append(mmap.mmap(file.fileno(), 0))
            # The same bytes: from here on the pages are dirty.
            self.maps[0][:] = self.maps[0][:]
            # Old enough for time stamps to be believed.
            time.sleep(2.1)
        _watch(self._pass)

    def passed(self) -> list[str]:
        """Return the points at which something was exchanged."""
        return self.done

    def _pass(self, point: str) -> None:
        if len(self.done) < len(self.at) and point == self.at[len(self.done)]:
            self.done.append(point)
            self._exchange(self.two if len(self.done) % 2 else self.one)

    def _exchange(self, source: str) -> None:
        model = Path(self.model)
        if self.method == RENAME:
            shutil.copy(Path(source) / FILE, model / "new")
            (model / "new").replace(model / FILE)
        elif self.method == IN_PLACE:
            file = model / FILE
            before = file.stat()
            bytes_ = (Path(source) / FILE).read_bytes()
            assert len(bytes_) == before.st_size
            with file.open("r+b") as out:
                out.write(bytes_)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif self.method == MAP:
            self.maps[0][:] = (Path(source) / FILE).read_bytes()
        elif self.method == FOLDER:
            shutil.copytree(source, f"{self.model}.new{len(self.done)}")
            model.rename(f"{self.model}.old{len(self.done)}")
            Path(f"{self.model}.new{len(self.done)}").rename(model)
        else:
            new = Path(f"{self.model}.new")
            new.symlink_to(source)
            new.replace(model)


def _watch(passes: Callable[[str], None]) -> None:
    """Call `passes` with each point that a load passes. The plugin, which is loaded afterwards, wraps around this."""
    from vllm.model_executor.model_loader import default_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    prepare, read, load = (
        DefaultModelLoader._prepare_weights,
        default_loader.safetensors_weights_iterator,
        DefaultModelLoader.load_weights,
    )

    def prepare_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        listed = prepare(self, *args, **kwargs)
        passes(LISTED)
        return listed

    def iterate(tensors: Iterator[Any]) -> Iterator[Any]:
        for count, tensor in enumerate(tensors):
            if count == 20:  # of 39
                passes(HALF_READ)
            yield tensor
        passes(READ)

    def safetensors_weights_iterator(hf_weights_files: list[str], *args: Any, **kwargs: Any) -> Iterator[Any]:
        passes(OPENED)
        return iterate(read(hf_weights_files, *args, **kwargs))

    def load_weights(self: Any, model: Any, model_config: Any) -> Any:
        result = load(self, model, model_config)
        passes(LOADED)
        return result

    DefaultModelLoader._prepare_weights = prepare_weights
    DefaultModelLoader.load_weights = load_weights
    default_loader.safetensors_weights_iterator = safetensors_weights_iterator
    if os.environ.get("KVPROV_MODE") != "off":
        from kvprov.engines import loading

        identify = loading.combined_identity

        def combined_identity(*args: Any, **kwargs: Any) -> Any:
            identified = identify(*args, **kwargs)
            passes(HASHED)
            return identified

        loading.combined_identity = combined_identity
