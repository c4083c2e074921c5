"""Workers and ledgers for these tests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvprov.contract import ABSENT, Digester, Known, Value
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.key import key_text
from kvprov.contract.registry import Registry
from kvprov.identity.canonical import config_identity
from kvprov.identity.domain import FleetSecret, sharing_domain
from kvprov.ledger import LedgerWriter

SECRET = FleetSecret(b"0123456789abcdef", "2026-1")
FACTS = {"engine": "vLLM 0.32.0", "host": "worker-1"}


def worker(rope_theta: float = 10000.0, **values: Value) -> dict[str, Value]:
    """A worker half, with a model configuration whose preimage is kept in this process."""
    config = {"config": {"rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"}}, "resolved": {}}
    return {
        "weights": Known("tensors-v1-blake3:" + "ab" * 32),
        "precision": Known(config_identity({"compute_dtype": "bfloat16"})),
        "model_config": Known(config_identity(config)),
        "kv_representation": Known(config_identity({"layout": "NHD"})),
        **values,
    }


def request(
    adapter: str | None = None, salt: str | None = None, secret: FleetSecret | None = SECRET
) -> dict[str, Value]:
    return {
        "adapter": ABSENT if adapter is None else Known(f"adapter-v1-blake3:{adapter.encode().hex():0>64}"),
        "sharing_domain": ABSENT if salt is None else sharing_domain(salt, secret),
        "client_namespace": ABSENT,
    }


def digester(registry: Registry = BUILT_IN, **values: Any) -> Digester:
    return Digester(registry, worker(**values))


def writer(location: Path | str, **options: Any) -> LedgerWriter:
    return LedgerWriter(str(location), FACTS, logging.getLogger("tests.ledger"), **options)


def note(
    ledger: LedgerWriter,
    of: Digester,
    half: Mapping[str, Value],
    names: Mapping[str, str] | None = None,
    bits: int = 256,
) -> str:
    """Note a request, and return its digest's text."""
    text = key_text(of.digest(half), bits)  # type: ignore[arg-type]
    ledger.note(text, of, half, names or {})
    return text


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
