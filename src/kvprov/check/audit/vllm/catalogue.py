"""Which of vLLM's connectors are audited, how; and whether vLLM has any that is not known here."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvprov.check.audit.subject import Budget, Subject
from kvprov.check.audit.vllm import taps
from kvprov.check.audit.vllm.binding import Binder
from kvprov.check.audit.vllm.world import BLOCK, KeysOf, Spell, World

BUDGET: Final = Budget(samples=512, seconds=0.1, few=3)
"""Thirty facts of ten connectors, stock and bound, within a minute."""

_NOT_INSTALLED: Final = "{} is not installed"


@dataclass(frozen=True, slots=True)
class Driver:
    """How one connector, or one of its tiers, is driven.

    Attributes:
        name: As reports show it.
        connector: vLLM's name for it.
        spell: Its tap.
        extra: Its configuration, given a folder.
        prepare: What is replaced behind the tap, once in the process.
        needs: The package without which it cannot be made.
        note: What a reader should know of it.
        tier: The tier of OffloadingConnector that it is for; empty otherwise.
        close: Ends a connector. Most hold nothing, and some would wait for a server that is not there.
    """

    name: str
    connector: str
    spell: Spell
    extra: Callable[[Path], Mapping[str, Any]] = lambda _root: {}
    prepare: Callable[[], None] = lambda: None
    needs: str = "vllm"
    note: str = ""
    tier: str = ""
    close: Callable[[Any], None] = lambda _connector: None


def _shut_down(connector: Any) -> None:
    """End what holds threads and memory."""
    connector.shutdown()


def _over(tier: str, **parameters: Any) -> Callable[[Path], Mapping[str, Any]]:
    def extra(root: Path) -> Mapping[str, Any]:
        given = {name: value(root) if callable(value) else value for name, value in parameters.items()}
        secondary = {"type": tier, **given}
        return {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [secondary],
        }

    return extra


_OBJECTS: Final = {"bucket": "audit", "endpoint_override": "http://127.0.0.1:9", "access_key": "a", "secret_key": "b"}

DRIVERS: Final = (
    Driver(
        "ExampleConnector",
        "ExampleConnector",
        taps.example,
        lambda root: {"shared_storage_path": str(root / "store")},
        note="once SharedStorageConnector",
    ),
    Driver(
        "HF3FSKVConnector",
        "HF3FSKVConnector",
        taps.hf3fs,
        lambda root: {"hf3fs_storage_path": str(root / "pages")},
        taps.prepare_hf3fs,
    ),
    Driver(
        "OffloadingConnector (example)",
        "OffloadingConnector",
        taps.offload(taps.plain_key),
        _over("example"),
        note="a tier in memory; its keys are those of the connector itself",
        tier="example",
        close=_shut_down,
    ),
    Driver(
        "OffloadingConnector (fs)",
        "OffloadingConnector",
        taps.offload(taps.file_key),
        _over("fs", root_dir=lambda root: str(root / "blocks"), n_read_threads=1, n_write_threads=1),
        tier="fs",
        close=_shut_down,
    ),
    Driver(
        "OffloadingConnector (obj)",
        "OffloadingConnector",
        taps.offload(taps.object_key),
        _over("obj", store_config=_OBJECTS),
        taps.prepare_obj,
        tier="obj",
        close=_shut_down,
    ),
    Driver(
        "OffloadingConnector (p2p)",
        "OffloadingConnector",
        taps.offload(taps.peer_key),
        _over("p2p", host="127.0.0.1", port=1),
        taps.prepare_p2p,
        note="with the fingerprint by which peers refuse each other",
        tier="p2p",
        close=_shut_down,
    ),
    Driver(
        "OffloadingConnector (kvcr)",
        "OffloadingConnector",
        taps.offload(taps.plain_key),
        _over("kvcr"),
        needs="kvcr",
        tier="kvcr",
        close=_shut_down,
    ),
    Driver(
        "MooncakeStoreConnector",
        "MooncakeStoreConnector",
        taps.mooncake(taps.mooncake_worker),
        prepare=taps.prepare_mooncake,
        needs="mooncake",
    ),
    Driver(
        "SimpleCPUOffloadConnector",
        "SimpleCPUOffloadConnector",
        taps.simple_offload,
        lambda _root: {"cpu_bytes_to_use": 1 << 24},
        note="shares nothing beyond its own engine",
    ),
    Driver("LMCacheConnectorV1", "LMCacheConnectorV1", taps.lmcache, needs="lmcache"),
    Driver(
        "LMCacheMPConnector",
        "LMCacheMPConnector",
        taps.lmcache_mp,
        lambda _root: {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 1},
        taps.prepare_lmcache_mp,
        needs="lmcache",
        note="keys as its server names files",
    ),
)


@dataclass(slots=True)
class Catalogue:
    """What of vLLM is audited.

    Attributes:
        subjects: What is.
        refused: Connectors without a driver that kvprov refuses, with the reason; or that only hand requests on.
        unknown: Connectors and tiers that nobody knows.
        skipped: Those whose packages are not installed.
    """

    subjects: list[Subject] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def prepare_environment(root: Path) -> None:
    """Set what LMCache and Mooncake read from the environment. It decides nothing of a key but a chunk's length."""
    configuration = root / "mooncake.json"
    configuration.write_text(json.dumps({"mode": "standalone-store", "global_segment_size": 0, "protocol": "tcp"}))
    sockets = root / "rpc"
    sockets.mkdir(exist_ok=True)
    os.environ.update(
        MOONCAKE_CONFIG_PATH=str(configuration),
        VLLM_RPC_BASE_PATH=str(sockets),
        LMCACHE_CHUNK_SIZE=str(BLOCK),
        LMCACHE_LOCAL_CPU="False",
        LMCACHE_TRACK_USAGE="false",
        LMCACHE_DISABLE_BANNER="1",
    )


def catalogue(root: Path, others: list[Subject]) -> Catalogue:
    """Return what is audited of the installed vLLM, and what of it is not known.

    Args:
        root: A folder for files.
        others: Subjects that other packages declare.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    found = Catalogue(subjects=list(others))
    registered = set(KVConnectorFactory._registry)
    tiers = set(SecondaryTierFactory._registry)
    world, binders = World(root), dict[str, Binder]()
    for driver in DRIVERS:
        if driver.connector not in registered or (driver.tier and driver.tier not in tiers):
            found.skipped[driver.name] = "this release of vLLM does not have it"
        elif importlib.util.find_spec(driver.needs) is None:
            found.skipped[driver.name] = _NOT_INSTALLED.format(driver.needs)
        else:
            driver.prepare()
            found.subjects.append(_subject(world, driver, binders))
    driven = {driver.connector for driver in DRIVERS} | {subject.connector for subject in others}
    for name in sorted(registered - driven):
        reason = _refusal(name)
        if reason:
            found.refused[name] = reason
        else:
            found.unknown.append(name)
    known = {driver.tier for driver in DRIVERS} | {subject.name for subject in others}
    found.unknown += [f"OffloadingConnector ({tier})" for tier in sorted(tiers - known)]
    return found


def _subject(world: World, driver: Driver, binders: dict[str, Binder]) -> Subject:
    from kvprov.engines.vllm.connectors import BOUND, TABLE

    extra = driver.extra(world.root)
    entry = TABLE.get(driver.connector)
    bound, unbound = None, "kvprov does not bind it"
    if entry is not None and entry.treatment in BOUND:
        binder = binders.setdefault(entry.treatment, Binder(world, driver.connector))
        bound = KeysOf(world, driver.connector, extra, driver.spell, binder.stamp, binder.start, close=driver.close)
    elif entry is not None:
        unbound = entry.reason
    native = KeysOf(world, driver.connector, extra, driver.spell, close=driver.close)
    return Subject(driver.name, driver.connector, native, bound, unbound, driver.note, BUDGET)


def _refusal(name: str) -> str:
    """Return why a connector without a driver needs none; empty when nothing says so.

    What hands requests on has no keys of its own. Of the others it is tried, not looked up, whether kvprov refuses
    them by name: then no bound engine runs with them.
    """
    from kvprov.engines.vllm import connectors
    from kvprov.errors import BindingError

    entry = connectors.TABLE.get(name)
    if entry is None:
        return ""
    if entry.treatment is connectors.Treatment.CHILDREN:
        return f"{entry.treatment}: {entry.reason}"
    try:
        connectors.check(name, None)
    except BindingError:
        return f"{entry.treatment}: {entry.reason}"
    return ""
