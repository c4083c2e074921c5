"""vLLM's MultiConnector over a folder for ExampleConnector and one for OffloadingConnector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.host_offload import offloading
from tests.support.provenance import DIMENSIONS
from tests.support.tiers import Tier
from tests.support.tiers.example import example, folders
from tests.support.tiers.offloading import file_tier, files


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    """Return the members of the KV transfer configuration for MultiConnector over `children`."""
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_role": "kv_both", **child} for child in children]},
    }


def _keys(prompts: Path, blocks: Path) -> list[str]:
    return [*folders(prompts), *files(blocks)]


@contextmanager
def over_two(folder: Path) -> Iterator[Tier]:
    """Both stores, the first of which is asked first."""
    prompts, blocks = folder / "prompts", folder / "blocks"
    for root in (prompts, blocks):
        root.mkdir(parents=True, exist_ok=True)
    yield Tier(
        "multi",
        multi(example(prompts), offloading(file_tier(blocks))),
        settle=1.0,
        collides=frozenset(DIMENSIONS),
        dies=frozenset({"kv_representation"}),
        keys=partial(_keys, prompts, blocks),
    )
