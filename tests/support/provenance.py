"""Provenances that differ in chosen dimensions, and how to launch and ask an engine under each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.engine import Answer, Engine, Launch
from tests.support.models import Models
from tests.support.processes import Step

DIMENSIONS = ("adapter", "sharing_domain", "weights", "precision", "model_config", "kv_representation")
COMPUTATIONAL = tuple(name for name in DIMENSIONS if name != "sharing_domain")


@dataclass(frozen=True)
class Provenance:
    """The first value of each dimension, but the second of those named."""

    differs: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, *names: str) -> Provenance:
        return cls(frozenset(names))

    @property
    def label(self) -> str:
        return "+".join(sorted(self.differs)) or "first"

    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = {}
        if "precision" in self.differs:
            args["quantization"] = "fp8_per_channel"
        if "model_config" in self.differs:
            args["hf_overrides"] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
        if "kv_representation" in self.differs:
            args["kv_cache_dtype"] = "float16"
        return args

    def launch(self, model: str, store: Path | None, mode: str, withhold: str = "") -> Launch:
        env = {"KVPROV_UNSAFE_WITHHOLD": withhold} if withhold else {}
        return Launch(model, store, mode, env, self.args())

    def ask(self, models: Models, prompts: Sequence[Sequence[int]]) -> Step:
        # Numbers of their own: vLLM takes an adapter for the one that it has loaded under its number.
        policy, number = ("inverted", 2) if "adapter" in self.differs else ("standard", 1)
        salt = "tenant-2" if "sharing_domain" in self.differs else "tenant-1"
        return partial(ask, prompts=prompts, adapter=models.adapter(policy, number), salt=salt)


def ask(engine: Engine, **request: Any) -> tuple[list[Answer], int]:
    """Return the answers, and how many tokens the engine says it loaded from the store meanwhile."""
    before = engine.external_hits()
    answers = engine.generate(**request)
    return answers, engine.external_hits() - before


def copied(store: Path, name: str) -> Path:
    """Return a fresh copy of a store."""
    target = store.with_name(f"{store.name}-{name}")
    shutil.copytree(store, target)
    return target
