"""What tests of LMCacheMPConnector make engines do, and what these send. Nothing here imports kvprov."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine import Engine, Launch
from tests.support.lmcache_mp import LMCacheServer, fs_l2, lmcache_server
from tests.support.models import BLOCK
from tests.support.processes import Processes
from tests.support.tiers.lmcache_mp import ARGS

SETTLE = 1.5
"""Seconds until the second tier has what was stored."""

SECRET = "a fleet secret of more than sixteen bytes"
ENV = {"KVPROV_SECRET": SECRET, "KVPROV_SECRET_KEY_ID": "fleet"}


@dataclass(frozen=True)
class Place:
    """A server and the folder of its second tier."""

    server: LMCacheServer
    l2: Path


@contextmanager
def place_in(folder: Path) -> Iterator[Place]:
    """Run a server with a second tier in `folder` until the block ends."""
    (folder / "l2").mkdir()
    with lmcache_server(folder, fs_l2(folder / "l2")) as server:
        yield Place(server, folder / "l2")


def full(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens a warm store gives: whole chunks, and never the last token."""
    return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def launch(model: str, server: LMCacheServer, mode: str = "enforce", **more: Any) -> Launch:
    env, args, extra = more.pop("env", ENV), more.pop("args", {}), more.pop("extra", {})
    # The folder is not used: the connector's configuration replaces that of ExampleConnector.
    return Launch(model, server.log.parent, mode, env, ARGS | args, server.connector(**extra), **more)


# What a connector's two halves send.


@dataclass(frozen=True)
class Sent:
    """One message to the server, or one transfer, as far as it names entries."""

    site: str
    model_name: str = ""
    salt: str = ""
    start: int = 0
    end: int = 0


def record(engine: Engine) -> None:
    """Note from now on what is sent."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    sent: list[Sent] = []
    engine.sent = sent  # type: ignore[attr-defined]

    def noting(owner: Any, name: str, key_at: int) -> None:
        native = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            key = args[key_at] if key_at >= 0 else None
            if key is None:
                sent.append(Sent(name))
            else:
                sent.append(Sent(name, key.model_name, key.cache_salt, key.start, key.end))
            return native(*args, **kwargs)

        setattr(owner, name, noted)

    for client in engine.core.scheduler.connector.scheduler_adapter.req_clients.values():
        noting(client, "lookup", 0)
        noting(client, "free_lookup_locks", 0)
        noting(client, "end_session", -1)
    transfer = get_kv_transfer_group().worker_adapter.transfer_ctx
    noting(transfer, "submit_store", 1)
    noting(transfer, "submit_retrieve", 1)


def recorded(engine: Engine) -> list[Sent]:
    """Return what was sent since the last call."""
    sent = list(engine.sent)  # type: ignore[attr-defined]
    engine.sent.clear()  # type: ignore[attr-defined]
    return sent


def sites(sent: Sequence[Sent]) -> set[str]:
    return {one.site for one in sent}


def keys(sent: Sequence[Sent]) -> set[tuple[str, str]]:
    return {(one.model_name, one.salt) for one in sent if one.site != "end_session"}


def named(processes: Processes, start: Launch, steps: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run an engine, and return what its steps returned, by name, and its log."""
    run = processes.run(start, *steps.values())
    return dict(zip(steps, run.results, strict=True)), run.log
