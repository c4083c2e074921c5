"""vLLM's HF3FSKVConnector over files, with its metadata server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.hf3fs import hf3fs, install, metadata_server
from tests.support.provenance import DIMENSIONS
from tests.support.tiers import Tier


@contextmanager
def files(folder: Path) -> Iterator[Tier]:
    """A folder of pages and a metadata server that knows which is whose."""
    with metadata_server(folder) as server:
        yield Tier(
            "hf3fs",
            hf3fs(folder / "pages"),
            before=partial(install, server.url),
            settle=1.0,
            # The key holds tokens and nothing else; what is read is taken for whatever type the reader has.
            collides=frozenset(DIMENSIONS),
            keys=server.keys,
        )
