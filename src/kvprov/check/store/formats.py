"""How connectors name entries in folders: by the name alone it is known which connector wrote a file.

Sources: vLLM 0.32 (`example_connector.py`, `kv_offload/file_mapper.py`), LMCache 0.5.6 (`l2_adapters/fs_l2_adapter.py`,
`connector/fs_connector.py`, `local_disk_backend.py`), SGLang 0.5.23 (`hicache_storage.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SAFETENSORS: Final = "safetensors"
RAW: Final = "raw"
HEADED: Final = "headed"


@dataclass(frozen=True, slots=True)
class Format:
    """How one connector lays out a folder.

    Attributes:
        name: As `--format` takes it.
        title: What it is, for people.
        pattern: Matches the path of an entry within the store, with `/` between folders. The group `dtype` is the
            element type, where the name says it; the group `base`, the folder beside which a description of it lies.
        payload: How the bytes are laid out: `safetensors`, `raw` elements, or raw elements behind LMCache's header.
    """

    name: str
    title: str
    pattern: re.Pattern[str]
    payload: str


def _format(name: str, title: str, pattern: str, payload: str) -> Format:
    return Format(name, title, re.compile(rf"(?:.*/)?{pattern}", re.DOTALL), payload)


_LMCACHE: Final = r"[^/@]+@[0-9]+@[0-9]+@-?(?:0x)?[0-9a-f]+@(?P<dtype>[a-z][a-z0-9_]*)(?:@[^/]*)?"

FORMATS: Final[Mapping[str, Format]] = {
    found.name: found
    for found in (
        _format(
            "example",
            "vLLM's ExampleConnector",
            r"(?:[0-9a-f]{32}|[0-9a-f]{64})/[^/]+\.safetensors",
            SAFETENSORS,
        ),
        _format(
            "vllm-fs",
            "the fs tier of vLLM's OffloadingConnector",
            r"(?P<base>[^/]+_[0-9a-f]{12})_r[0-9]+/[0-9a-f]{3}/[0-9a-f]{2}_g[0-9]+/[0-9a-f]+\.bin",
            RAW,
        ),
        _format(
            "lmcache-mp",
            "a folder of LMCache's server (fs L2)",
            r"[^/@]+@0x[0-9a-f]{8,}@[0-9a-f]+@[0-9a-f]+(?:@[^/@]+)?\.data",
            RAW,
        ),
        _format("lmcache-fs", "a folder as LMCache's remote store (fs://)", rf"{_LMCACHE}\.data", HEADED),
        _format("lmcache-disk", "LMCache's local disk", rf"{_LMCACHE}\.pt", RAW),
        _format("sglang-file", "SGLang's file backend of HiCache", r"[0-9a-f]{64}(?:\.[^/_]+)?_[^/]*\.bin", RAW),
    )
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a store.

    Attributes:
        path: Within the store, with `/` between folders. It is the key: no connector of these finds it otherwise.
        format: How it is laid out.
        dtype: The element type that its name says, or None.
        described: The path of a JSON file beside it that says the element type, or None.
    """

    path: str
    format: Format
    dtype: str | None
    described: str | None


def entry(path: str, only: str | None = None) -> Entry | None:
    """Return what a file of a store is, or None where no connector gives such names to entries.

    Args:
        path: The file's path within the store.
        only: The one format to go by, or None for all.
    """
    for name, form in FORMATS.items():
        match = form.pattern.fullmatch(path) if only in (None, name) else None
        if match is not None:
            groups = match.groupdict()
            base = groups.get("base")
            described = None if base is None else f"{path[: match.end('base')]}/config.json"
            return Entry(path, form, groups.get("dtype"), described)
    return None
