"""For callers of an LMCache server's HTTP interface: under which model name and salt a bound engine keeps state.

    worker = announced(open("engine.log"))
    salt = request_salt(worker, adapter="/adapters/a", tenant_salt="tenant-1", secret=secret)
    requests.post(f"{server}/cache/prefetches", json=prefetch_body(worker, token_ids, salt))

Everything in a salt is known to whoever runs the engine: what the engine announced when it started, and of a request
its adapter, its salt and the fleet's secret. Requests with media have salts of their own, and cannot be asked for here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvprov.contract.descriptor import ABSENT, Known, Value
from kvprov.contract.digest import Digester
from kvprov.contract.dimension import Dimension, Half, Kind
from kvprov.contract.dimensions import ADAPTER, CLIENT_NAMESPACE, SHARING_DOMAIN
from kvprov.contract.key import DigestBits, key_text
from kvprov.contract.registry import Registry
from kvprov.errors import BindingError, SettingsError
from kvprov.identity.adapter import identify_adapter
from kvprov.identity.domain import FleetSecret, sharing_domain

MODEL_NAME: Final = "lmcache.model_name"
WORLD_SIZE: Final = "lmcache.world_size"

_START: Final = re.compile(r"kvprov: mode=\S+ .*dimensions=(\S+) .*bits=(\d+) secret=(\S+)")
_VALUE: Final = re.compile(r"kvprov: ([a-z][a-z0-9_.]*)=(\S+)\s*$")
_UNKNOWN: Final = re.compile(r"kvprov: ([a-z][a-z0-9_.]*)=Unknown\(")


@dataclass(frozen=True, slots=True)
class Announced:
    """What an engine said of itself when it started, and when its weights changed.

    Attributes:
        model_name: What stands in its keys in the model's place.
        world_size: How many ranks share an entry's tokens.
        identities: Of each dimension of its worker half.
        request: The names of the request half's dimensions.
        bits: How much of a digest enters keys.
        secret: The key id of its fleet secret, or None.
    """

    model_name: str
    world_size: int
    identities: Mapping[str, str]
    request: tuple[str, ...]
    bits: DigestBits
    secret: str | None


def announced(lines: Iterable[str]) -> Announced:
    """Read what an engine announced from its log. Where it says something twice, the later is meant.

    Args:
        lines: Of the log.

    Raises:
        BindingError: It is not the log of a bound engine with LMCacheMPConnector, or something is not known of it.
    """
    start: re.Match[str] | None = None
    values: dict[str, str] = {}
    for line in lines:
        if found := _START.search(line):
            start, values = found, {k: v for k, v in values.items() if k in (MODEL_NAME, WORLD_SIZE)}
        elif found := _UNKNOWN.search(line):
            values.pop(found[1], None)
        elif found := _VALUE.search(line):
            values[found[1]] = found[2]
    if start is None or MODEL_NAME not in values or WORLD_SIZE not in values:
        raise BindingError(
            "This is not the log of an engine that kvprov binds to an LMCache server.",
            "Give the whole log of the engine, at level INFO.",
        )
    model_name, world_size = values.pop(MODEL_NAME), int(values.pop(WORLD_SIZE))
    dimensions = start[1].split(",")
    identities = {name: values[name] for name in dimensions if name in values}
    return Announced(
        model_name=model_name,
        world_size=world_size,
        identities=identities,
        request=tuple(name for name in dimensions if name not in identities),
        bits=DigestBits(int(start[2])),
        secret=None if start[3] == "none" else start[3],
    )


def request_salt(
    worker: Announced,
    *,
    adapter: str | Path | None = None,
    tenant_salt: str | None = None,
    secret: FleetSecret | None = None,
    values: Mapping[str, Value] | None = None,
) -> str:
    """Return the salt that a bound engine gives LMCache for a request.

    Args:
        worker: What the engine announced.
        adapter: Folder of the request's adapter.
        tenant_salt: The request's `cache_salt`. An empty one is none.
        secret: The fleet's secret; None where the engine has none (`kvprov.identity.domain.load_secret` reads one).
        values: Values of request dimensions that others have declared.

    Raises:
        BindingError: A dimension of the engine is not known, and nothing of it is shared then; or `values` lacks one.
        SettingsError: The engine has another secret.
        KvprovError: The adapter cannot be read.
    """
    key_id = None if secret is None else secret.key_id
    if key_id != worker.secret:
        raise SettingsError(
            f"The engine's fleet secret is {worker.secret or 'none'}, and the one given here is {key_id or 'none'}.",
            "Give the same secret, under the same key id.",
        )
    given: dict[str, Value] = {
        ADAPTER.name: ABSENT if adapter is None else Known(identify_adapter(Path(adapter)).identity),
        SHARING_DOMAIN.name: sharing_domain(tenant_salt, secret) if tenant_salt else ABSENT,
        CLIENT_NAMESPACE.name: ABSENT,
        **(values or {}),
    }
    if missing := [name for name in worker.request if name not in given]:
        raise BindingError(
            f"There is no value for {', '.join(missing)}: the engine does not know it, or somebody declared it.",
            "If the engine logs that it does not know it, nothing is shared. Otherwise give its value.",
        )
    halves = {Half.WORKER: worker.identities, Half.REQUEST: worker.request}
    registry = Registry(
        Dimension(name, half, Kind.COMPUTATIONAL, "") for half, names in halves.items() for name in names
    )
    digester = Digester(registry, {name: Known(identity) for name, identity in worker.identities.items()})
    return key_text(digester.digest({name: given[name] for name in worker.request}), worker.bits)


def prefetch_body(worker: Announced, token_ids: Sequence[int], salt: str) -> dict[str, Any]:
    """Return the body of `POST /cache/prefetches` that lets a server fetch the state of a prompt.

    Args:
        worker: What the engine announced.
        token_ids: The prompt.
        salt: See `request_salt`.
    """
    return {
        "model_name": worker.model_name,
        "world_size": worker.world_size,
        "token_ids": list(token_ids),
        "cache_salt": salt,
    }
