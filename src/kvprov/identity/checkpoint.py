"""The identity of a checkpoint: of the tensors in the files that an engine's loader reads."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvprov.errors import UnidentifiableError, UnreadableContentError
from kvprov.identity.digest_cache import DigestCache
from kvprov.identity.files import OpenFile, open_file, unreadable
from kvprov.identity.progress import Progress, SilentProgress
from kvprov.identity.strict_json import parse_object
from kvprov.identity.tensors import Tensor, hash_file, tensors_digest, tensors_identity

INDEX: Final = "model.safetensors.index.json"
MISTRAL_INDEX: Final = "consolidated.safetensors.index.json"

_MAX_INDEX_BYTES: Final = 256 << 20
_FOREIGN: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml", ".npz", ".h5", ".msgpack", ".onnx")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True)
class Identified:
    """Content that has an identity.

    Attributes:
        identity: `scheme:payload`.
        bytes: Bytes of the files.
        tensors: How many tensors they hold.
        seconds: How long identifying took.
        files: Names of the files, in the order in which they were read.
        cached: Whether every file's digests were remembered, so that none was hashed.
    """

    identity: str
    bytes: int
    tensors: int
    seconds: float
    files: tuple[str, ...]
    cached: bool


def _listing(folder: Path) -> list[str]:
    try:
        # As glob does for the loaders, without hidden files.
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))  # noqa: PTH208 - names only
    except OSError as error:
        raise unreadable(folder, error) from error


def _from_index(folder: Path, index: str, present: list[str]) -> list[str]:
    path = folder / index
    with open_file(path) as file:
        weight_map = parse_object(file.read_all(_MAX_INDEX_BYTES), path).get("weight_map")
        file.recheck()
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnreadableContentError(path, "it has no weight_map", "Fetch the checkpoint again.")
    names = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise UnreadableContentError(
                path,
                f"it places the tensor {tensor[:80]!r} in {str(name)[:80]!r}, which is no file of this folder",
                "Do not use this checkpoint unless you know why: an index must not lead out of its folder.",
            )
        names.add(name)
    missing = sorted(names.difference(present))
    if missing:
        raise UnreadableContentError(
            path,
            f"it names {missing[0]!r}, which is missing" + (f", as are {len(missing) - 1} more" if missing[1:] else ""),
            "Complete the download.",
        )
    return sorted(names)


def select_files(folder: str | Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint that vLLM's and Hugging Face's loaders read, by name.

    As vLLM's `DefaultModelLoader` with load format `auto`: `consolidated*.safetensors` when there are any (Mistral's
    own format), else `*.safetensors`; of these, exactly the files that the matching index names, when there is one.

    Raises:
        UnreadableContentError: the folder cannot be read, or its index is broken, leads out of the folder or names a
            file that is missing.
        UnidentifiableError: the folder has no safetensors file. Pickled weights are never read, since unpickling runs
            whatever code they hold.
    """
    folder = Path(folder)
    listing = _listing(folder)
    present = fnmatch.filter(listing, "consolidated*.safetensors")
    index = MISTRAL_INDEX if present else INDEX
    present = present or fnmatch.filter(listing, "*.safetensors")
    if index in listing:
        present = _from_index(folder, index, present)
    if not present:
        foreign = sorted({suffix for name in listing if (suffix := Path(name).suffix.lower()) in _FOREIGN})
        raise UnidentifiableError(
            folder,
            "it holds no safetensors file" + (f", only {', '.join(foreign)}" if foreign else ""),
            "Check the path. Convert a checkpoint of another format to safetensors, or declare KVPROV_WEIGHTS_LABEL.",
        )
    return tuple(folder / name for name in present)


def _hub_cache() -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expandvars(os.environ[variable])).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def resolve_folder(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """Return a checkpoint's folder: the given one, else the local snapshot of a Hugging Face hub id.

    Nothing is downloaded. The cache is where `huggingface_hub` has it: `HF_HUB_CACHE`, else `hub` under `HF_HOME`,
    else `~/.cache/huggingface/hub`.

    Args:
        path_or_hub_id: A folder, or an id such as `org/name`.
        revision: A branch, tag or commit of the hub id; `main` by default. Of no use with a folder.

    Raises:
        UnreadableContentError: there is neither such a folder nor such a snapshot.
    """
    try:
        folder = Path(path_or_hub_id)
        if folder.is_dir():
            return folder
        if folder.exists():
            raise UnreadableContentError(folder, "it is a file, not a folder", "Name the folder that holds it.")
    except (OSError, ValueError) as error:
        shown = repr(str(path_or_hub_id)[:200])
        raise UnreadableContentError(shown, f"it is no path ({error})", "Check the path.") from error
    hub_id = str(path_or_hub_id)
    if _HUB_ID.fullmatch(hub_id) is None or ".." in hub_id:
        raise UnreadableContentError(folder, "there is no such folder", "Check the path.")
    revision = revision or "main"
    parts = revision.split("/")
    if "\0" in revision or any(part in {"", ".", ".."} for part in parts):
        raise UnreadableContentError(hub_id, f"{revision[:80]!r} is no revision", "Name a branch, a tag or a commit.")
    repository = _hub_cache() / f"models--{hub_id.replace('/', '--')}"
    snapshots = repository / "snapshots"
    commit = revision
    ref = repository.joinpath("refs", *parts)
    if ref.is_file():
        with open_file(ref) as file:
            commit = file.read_all(4096).decode("ascii", "replace").strip()
    if re.fullmatch(r"[A-Za-z0-9_-]+", commit) is None or not (snapshots / commit).is_dir():
        raise UnreadableContentError(
            hub_id,
            f"there is neither a folder of that name nor a local snapshot of its revision {revision!r}",
            f"Download it first: hf download {hub_id} --revision {revision}; or check HF_HOME and HF_HUB_CACHE.",
        )
    return snapshots / commit


class OpenCheckpoint:
    """The files of a checkpoint, opened once: hashed and loaded through the same descriptors. A context manager.

    The order that makes an identity hold for what was loaded: open, `settle`, load from `fd_paths` and `identify` in
    any order, `recheck`. A path may meanwhile lead to another file; a descriptor does not, and a write to its file
    shows in its stamp.
    What remains outside: whoever can write to the block device or set the machine's clock.

    Attributes:
        files: The files, in the order in which they were given.
        prefix: Stands before each tensor's name, as engines place a second checkpoint in a model.
    """

    def __init__(self, paths: Sequence[str | Path], prefix: str = "") -> None:
        self.prefix = prefix
        self._tensors: tuple[Tensor, ...] | None = None
        self._cached = False
        self._stack = ExitStack()
        files: list[OpenFile] = []
        try:
            for path in paths:
                files.append(self._stack.enter_context(open_file(path)))
        except BaseException:
            self._stack.close()
            raise
        self.files = tuple(files)

    @property
    def fd_paths(self) -> list[str]:
        """Paths from which this process loads the very files that were opened. They have no `.safetensors` suffix."""
        return [file.fd_path for file in self.files]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stamp.size for file in self.files)

    def tensors(self, cache: DigestCache | None = None, progress: Progress | None = None) -> tuple[Tensor, ...]:
        """Return every tensor, with the prefix before its name. Hashed once, however often asked for.

        Files that changed within the last 2 s are waited for first, 2 s at most: hashing them again afterwards would
        not show what was loaded in between.

        Raises:
            UnreadableContentError: a file is broken, or a tensor occurs in two files.
            ChangedContentError: a file changed since it was opened.
        """
        if self._tensors is None:
            self._tensors, self._cached = self._hash(cache, progress or SilentProgress())
        return self._tensors

    def _hash(self, cache: DigestCache | None, progress: Progress) -> tuple[tuple[Tensor, ...], bool]:
        self.settle()
        found: dict[str, OpenFile] = {}
        tensors: list[Tensor] = []
        cached = bool(self.files) and cache is not None
        progress.start(self.bytes)
        try:
            for file in self.files:
                hashed, remembered = _hash_or_remember(file, cache, progress)
                cached = cached and remembered
                for tensor in hashed:
                    if tensor.name in found:
                        raise UnreadableContentError(
                            file.path,
                            f"the tensor {tensor.name[:80]!r} is also in {found[tensor.name].path.name}",
                            "Remove the file that does not belong to the checkpoint, or give it an index "
                            f"({INDEX}) that names its files.",
                        )
                    found[tensor.name] = file
                    tensors.append(replace(tensor, name=self.prefix + tensor.name) if self.prefix else tensor)
        finally:
            progress.stop()
        return tuple(tensors), cached

    def settle(self) -> None:
        """Wait until every file is old enough for a write to show, 2 s at most.

        Whoever loads before hashing calls this before loading: a write in between must show in `recheck`.

        Raises:
            ChangedContentError: a file changed since it was opened.
        """
        for file in self.files:
            file.settle()

    def identify(self, cache: DigestCache | None = None, progress: Progress | None = None) -> Identified:
        """Return the identity of the tensors: the same for any sharding, file order, path, time and metadata.

        Args:
            cache: Where digests are remembered; by default they are not.
            progress: What is told how far hashing has come; see `rich_progress`.

        Raises:
            UnreadableContentError: a file is broken, or a tensor occurs in two files.
            ChangedContentError: a file changed since it was opened.
        """
        return combined_identity([self], cache=cache, progress=progress)

    @property
    def cached(self) -> bool:
        """Whether every file's digests were remembered, so that none was hashed."""
        return self._cached

    def recheck(self) -> None:
        """Check, after loading from `fd_paths`, that what was loaded is what was hashed.

        Raises:
            ChangedContentError: a file changed since it was opened.
        """
        for file in self.files:
            file.recheck()

    def close(self) -> None:
        """Close the files. Closing twice is allowed."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hash_or_remember(file: OpenFile, cache: DigestCache | None, progress: Progress) -> tuple[tuple[Tensor, ...], bool]:
    if cache is None:
        return hash_file(file, progress.advance), False
    remembered = cache.get(file)
    if remembered is None:
        with cache.lock(file):
            # Another process may have hashed it while this one waited.
            remembered = cache.get(file)
            if remembered is None:
                tensors = hash_file(file, progress.advance)
                cache.put(file, tensors)
                return tensors, False
    progress.advance(file.stamp.size)
    return remembered, True


def open_checkpoint(folder: str | Path) -> OpenCheckpoint:
    """Open the files of a checkpoint that a loader reads.

    Raises:
        UnreadableContentError: the folder, its index or one of its files cannot be read.
        UnidentifiableError: the folder has no safetensors file.
    """
    return OpenCheckpoint(select_files(folder))


def open_files(paths: Sequence[str | Path], prefix: str = "") -> OpenCheckpoint:
    """Open the files that a loader is about to read, with `prefix` before their tensors' names.

    Raises:
        UnreadableContentError: a file cannot be opened.
        UnidentifiableError: there is no file, or one whose name says that it is no safetensors file.
    """
    if not paths:
        raise UnidentifiableError(".", "a checkpoint of no files has no identity", "Name the files that are loaded.")
    for path in paths:
        if Path(path).suffix.lower() in _FOREIGN:
            raise UnidentifiableError(
                path, "it is no safetensors file", "Convert it to safetensors, or declare KVPROV_WEIGHTS_LABEL."
            )
    return OpenCheckpoint(paths, prefix)


def combined_identity(
    parts: Iterable[OpenCheckpoint], *, cache: DigestCache | None = None, progress: Progress | None = None
) -> Identified:
    """Return the identity of several checkpoints that one model is loaded from.

    Each part's prefix stands before its tensors' names, so a part is what its tensors are called in the model, and
    not where it came from.

    Raises:
        KvprovError: two parts hold a tensor of one name.
        UnreadableContentError: a file is broken.
        ChangedContentError: a file changed since it was opened.
    """
    began = time.perf_counter()
    parts = list(parts)
    tensors = [tensor for part in parts for tensor in part.tensors(cache, progress)]
    identity = tensors_identity(tensors_digest(tensors))
    return Identified(
        identity=identity,
        bytes=sum(part.bytes for part in parts),
        tensors=len(tensors),
        seconds=time.perf_counter() - began,
        files=tuple(file.path.name for part in parts for file in part.files),
        cached=bool(parts) and all(part.cached for part in parts),
    )


def identify_checkpoint(
    path: str | Path, *, cache: DigestCache | None = None, progress: Progress | None = None
) -> Identified:
    """Return the identity of the checkpoint in a folder: open, identify, recheck.

    Raises:
        UnreadableContentError: the folder, its index or one of its files cannot be read or is broken.
        UnidentifiableError: the folder has no safetensors file.
        ChangedContentError: a file changed meanwhile.
    """
    with open_checkpoint(path) as checkpoint:
        identified = checkpoint.identify(cache, progress)
        checkpoint.recheck()
        return identified
