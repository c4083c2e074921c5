"""Model code that a checkpoint brings along, as part of the model_config dimension."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvprov.contract.encoding import lp, u64
from kvprov.errors import UnidentifiableError
from kvprov.identity.checkpoint import resolve_folder
from kvprov.identity.files import open_file

MAX_CODE_BYTES = 16 << 20


def _targets(auto_map: object) -> list[str]:
    """Return the classes that an `auto_map` names; one of its entries may be a list with gaps."""
    if isinstance(auto_map, Mapping):
        return [target for value in auto_map.values() for target in _targets(value)]
    if isinstance(auto_map, list | tuple):
        return [target for value in auto_map for target in _targets(value)]
    return [auto_map] if isinstance(auto_map, str) else []


def remote_code(model: str, revision: str | None, config: Mapping[str, object]) -> str | None:
    """Return the digest of the Python files that a model configuration asks to run, or None when it asks for none.

    Every `*.py` in the checkpoint's folder counts, since those that are named import the others.

    Args:
        model: Folder or hub id of the checkpoint.
        revision: The code's revision, where it is a hub id.
        config: The model configuration.

    Returns:
        64 hex digits of BLAKE3-256 over `lp("kv-remote-code/1") || u64(count) || for each file by name: lp(name) ||
        lp(content)`.

    Raises:
        UnidentifiableError: The code comes from another repository.
        UnreadableContentError: A file cannot be read.
    """
    import blake3

    targets = _targets(config.get("auto_map"))
    if not targets:
        return None
    if any("--" in target for target in targets):
        raise UnidentifiableError(
            model, "its configuration runs code of another repository", "Copy the code beside the checkpoint."
        )
    folder = resolve_folder(model, revision)
    files = sorted(Path(folder).glob("*.py"), key=lambda path: path.name.encode("utf-8", "surrogateescape"))
    hasher = blake3.blake3(lp("kv-remote-code/1") + u64(len(files)))
    for path in files:
        with open_file(path) as file:
            hasher.update(lp(path.name) + lp(file.read_all(MAX_CODE_BYTES)))
    return hasher.hexdigest()
