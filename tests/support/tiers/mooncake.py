"""vLLM's MooncakeStoreConnector over TCP, with a store that outlives engines."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.mooncake import MooncakeServer, mooncake_server
from tests.support.tiers import Tier

COLLIDES = frozenset({"weights", "precision", "model_config", "kv_representation"})
"""The block-hash chain holds an adapter's name and path, and the salt; keys hold the last part of the model's path."""


class _Event:
    """Stands in for a CUDA event: on a CPU, what was launched is done."""

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


def prepare(sockets: str) -> None:
    """Make ready the process of an engine that runs the connector without a GPU.

    Args:
        sockets: What the names of folders for its sockets begin with.
    """
    import torch

    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    # The connector's halves meet at a socket whose name is the same for all engines of a machine. The names of sockets
    # are short, so the folder cannot be the test's.
    os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix=sockets)


def tier_of(server: MooncakeServer, sockets: str) -> Tier:
    """Return the tier of a store that is up."""
    return Tier(
        "mooncake-store",
        {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": {}},
        env={"MOONCAKE_CONFIG_PATH": str(server.configuration), "VLLM_HOST_IP": server.host},
        before=partial(prepare, sockets),
        settle=1.0,
        collides=COLLIDES,
        keys=server.keys,
    )


@contextmanager
def running(folder: Path) -> Iterator[tuple[MooncakeServer, Tier]]:
    """A store, and the tier that it is."""
    sockets = f"kvprov-{secrets.token_hex(4)}-"
    try:
        with mooncake_server(folder) as server:
            yield server, tier_of(server, sockets)
    finally:
        for left in Path(tempfile.gettempdir()).glob(f"{sockets}*"):
            shutil.rmtree(left)


@contextmanager
def store(folder: Path) -> Iterator[Tier]:
    """Mooncake's distributed store, one object for each block."""
    with running(folder) as (_, tier):
        yield tier
