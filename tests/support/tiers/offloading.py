"""vLLM's OffloadingConnector over files and over an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.host_offload import offloading
from tests.support.s3 import s3_server
from tests.support.tiers import Tier

COLLIDES = frozenset({"weights", "precision", "model_config"})
"""The block-hash chain holds an adapter's name and path, and the salt; names hold the model's path and the cache's
element type."""


def file_tier(root: Path) -> dict[str, object]:
    """Return the configuration of a tier of files below `root`."""
    return {"type": "fs", "root_dir": str(root)}


def files(root: Path) -> list[str]:
    """Return the names of the entries below `root`."""
    return sorted(str(file.relative_to(root)) for file in root.rglob("*.bin"))


@contextmanager
def fs(folder: Path) -> Iterator[Tier]:
    """A folder of files, one for each block."""
    root = folder / "blocks"
    root.mkdir(parents=True, exist_ok=True)
    yield Tier("offloading-fs", offloading(file_tier(root)), settle=1.0, collides=COLLIDES, keys=lambda: files(root))


NIXL = {"NIXL_TELEMETRY_ENABLE": "1"}
"""Without it, NIXL's transfers fail on this release."""


@contextmanager
def obj(folder: Path) -> Iterator[Tier]:
    """An object store, one object for each block."""
    with s3_server(folder) as server:
        tier = {"type": "obj", "store_config": server.store_config()}
        yield Tier("offloading-obj", offloading(tier), env=NIXL, settle=2.0, collides=COLLIDES, keys=server.keys)
