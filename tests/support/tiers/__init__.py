"""Shared tiers that engines are run against: real servers and folders, and how an engine is told of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Tier:
    """A tier that is ready, and how engines share it.

    Attributes:
        name: Of the path, as results and docs call it.
        connector: Members of the KV transfer configuration.
        env: Environment variables of the engine.
        args: Arguments of `vllm.LLM`.
        before: Called in the engine's process before the engine is made, in every mode: what only this CPU needs.
        settle: Seconds after the last answer of a writer until all it wrote is there to be read.
        collides: Dimensions that stock does not tell apart here: a reader of another value loads foreign tokens.
        dies: Those of them where stock finds the foreign entry and then fails.
        keys: Lists the names of all entries, as the store itself tells them; None where it cannot.
    """

    name: str
    connector: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    before: Callable[[], Any] | None = None
    settle: float = 0.0
    collides: frozenset[str] = frozenset()
    dies: frozenset[str] = frozenset()
    keys: Callable[[], list[str]] | None = None


Opener: TypeAlias = Callable[[Path], AbstractContextManager[Tier]]
"""Starts what a tier needs, with its data and logs in the folder, and ends it again."""
