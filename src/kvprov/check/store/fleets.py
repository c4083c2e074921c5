"""The engines whose workers `kvprov store check` can start, and what it lets them serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvprov.check.store.check import Fleet
from kvprov.check.store.served import Model
from kvprov.doctor.engines import HOSTS, installed
from kvprov.errors import StoreError

VLLM: Final = "vllm"
SGLANG: Final = "sglang"
ENGINES: Final[Mapping[str, tuple[str, ...]]] = {VLLM: ("example", "vllm-fs"), SGLANG: ("file",)}
"""The connectors of each engine whose stores can be compared, the default first."""


def installed_engine() -> str:
    """Return the engine of `ENGINES` that is installed.

    Raises:
        StoreError: None of them is, or several.
    """
    found = [engine for engine in ENGINES if installed(engine)]
    if len(found) != 1:
        names = " and ".join(HOSTS[engine].engine for engine in ENGINES)
        what = f"{names} are both installed" if found else f"Of {names}, none is installed"
        raise StoreError(
            f"{what} here.", "Name one with --engine." if found else "Run this in the environment of the engine."
        )
    return found[0]


def make_fleet(engine: str, connector: str | None, model: Model, work: Path) -> Fleet:
    """Return workers of an engine.

    Args:
        engine: Of `ENGINES`.
        connector: One of its connectors, or None for the first.
        model: What they serve.
        work: A folder for requests, logs and what is exchanged.

    Raises:
        StoreError: The engine has no such connector here.
        UnreadableContentError: The model cannot be read.
    """
    connectors = ENGINES[engine]
    chosen = connectors[0] if connector is None else connector
    if chosen not in connectors:
        raise StoreError(
            f"{chosen!r:.80} is none of {', '.join(connectors)}.", f"These are the connectors for {engine}."
        )
    if engine == SGLANG:
        from kvprov.check.store.sglang import SglangFleet

        return SglangFleet(model, work)
    from kvprov.check.store.vllm import CONNECTORS, VllmFleet

    return VllmFleet(model, CONNECTORS[chosen], f"vLLM with {chosen}", work)


def bundled(engine: str, arguments: Mapping[str, Any], work: Path) -> Model:
    """Return the bundled model with two of its adapters, as an engine can load them.

    Args:
        engine: Of `ENGINES`.
        arguments: More of what the engine is told.
        work: A folder for what has to be written.

    Raises:
        DemoError: It is not there.
    """
    from kvprov.demo.model import find

    bundle = find()
    adapters = bundle.adapter("standard"), bundle.adapter("inverted")
    model = Model(bundle.base, adapters, arguments=arguments)
    if engine != SGLANG:
        return model
    from kvprov.check.packages import need_packages
    from kvprov.check.store.sglang import with_queries

    need_packages()
    first, second = (with_queries(adapter, work / "adapters" / adapter.name) for adapter in adapters)
    return replace(model, adapters=(first, second))
