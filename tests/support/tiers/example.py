"""vLLM's ExampleConnector over a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.provenance import DIMENSIONS
from tests.support.tiers import Tier


def example(root: Path) -> dict[str, object]:
    """Return the members of the KV transfer configuration for a store in `root`."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(root)},
    }


def folders(root: Path) -> list[str]:
    """Return the names of the entries below `root`."""
    return sorted(folder.name for folder in root.iterdir())


@contextmanager
def folder_store(folder: Path) -> Iterator[Tier]:
    """A folder with a folder for each prompt."""
    root = folder / "prompts"
    root.mkdir(parents=True, exist_ok=True)
    yield Tier(
        "example",
        example(root),
        collides=frozenset(DIMENSIONS),
        # The file's type of element is not the cache's.
        dies=frozenset({"kv_representation"}),
        keys=partial(folders, root),
    )
