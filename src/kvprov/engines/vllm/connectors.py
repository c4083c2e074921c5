"""Which of vLLM's connectors are bound, and how; every other one is refused."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvprov.errors import BindingError


class Treatment(enum.StrEnum):
    """What kvprov does with a connector."""

    VIEW = "bound by view"
    """The connector hashes tokens and content identifiers: it is shown requests with one more identifier."""
    REFUSED = "refused"
    """The engine does not start with it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Attributes:
        treatment: What kvprov does with the connector.
        reason: Why, or what its keys are made of.
        strength: How strong the connector's own hash of provenance is; empty when it is refused.
    """

    treatment: Treatment
    reason: str
    strength: str = ""


EXAMPLE: Final = "ExampleConnector"

TABLE: Final = {
    EXAMPLE: Entry(
        Treatment.VIEW,
        "folder names hash prompt tokens and content identifiers",
        "128 bits: MD5 over tokens and the digest's text (SHA-256 where the system forbids MD5)",
    ),
}
"""The connectors that are bound. A connector that is not here is refused, a new one of a new release included."""

UNBOUND_ADVICE: Final = (
    "Use a connector that kvprov binds ({bound}), or set KVPROV_MODE=off to run without any protection."
)


def check_shape(parallel_config: Any) -> None:
    """Check that the connector's entries are one rank's.

    Raises:
        BindingError: Several ranks would overwrite each other's entries: the connector names files by layer alone.
    """
    ranks = parallel_config.world_size
    if ranks > 1:
        raise BindingError(
            f"{EXAMPLE} holds the state of one rank, and this engine has {ranks}: in vLLM, ranks overwrite one file.",
            "Run it with one worker, or use another connector.",
        )


def check_encoder_tier(vllm_config: Any) -> None:
    """Check that encoder outputs are not shared.

    Raises:
        BindingError: An encoder-cache tier is configured. Its keys are identifiers of inputs alone.
    """
    if vllm_config.ec_transfer_config is not None:
        raise BindingError(
            "kvprov does not bind encoder-cache tiers: their entries would be shared without regard to provenance.",
            "Remove --ec-transfer-config, or set KVPROV_MODE=off to run without any protection.",
        )


def check_block_hash(algorithm: str) -> None:
    """Check that block hashes may stand in keys of a shared tier.

    Raises:
        BindingError: The hash is not collision resistant: a tenant could make two provenances meet.
    """
    if not algorithm.startswith("sha256"):
        raise BindingError(
            f"The block hash {algorithm} is not collision resistant, so keys of a shared tier would not be.",
            "Use sha256, which is vLLM's default, or sha256_cbor.",
        )


def check(kv_transfer_config: Any) -> Entry:
    """Return the table's entry for the connector that `kv_transfer_config` names.

    Raises:
        BindingError: The connector is not bound.
    """
    name, module = kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_module_path
    entry = TABLE.get(name) if not module or module == EXPLICIT_MODULE else None
    if entry is None:
        shown = f"{name} of {module}" if module else name
        raise BindingError(
            f"kvprov does not bind the connector {shown}: its entries would be shared without regard to provenance.",
            UNBOUND_ADVICE.format(bound=", ".join(TABLE)),
        )
    return entry


EXPLICIT_MODULE: Final = "kvprov.engines.vllm.connector"


def wrap_get_connector_class(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `KVConnectorFactory.get_connector_class` that answers with the bound class, or refuses."""

    def get_connector_class(cls: Any, kv_transfer_config: Any) -> Any:
        check(kv_transfer_config)
        if not kv_transfer_config.kv_connector_module_path:
            from kvprov.engines.vllm import connector

            return getattr(connector, kv_transfer_config.kv_connector)
        return original(kv_transfer_config)

    return get_connector_class
