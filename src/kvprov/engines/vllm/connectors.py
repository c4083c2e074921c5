"""What kvprov does with each of vLLM's connectors: every one is bound or refused."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvprov.errors import BindingError


class Treatment(enum.StrEnum):
    """What kvprov does with a connector."""

    CHAIN = "chain"
    """Its keys are made of block hashes, which hold the digest."""
    VIEW = "view"
    """It hashes tokens and content identifiers: it is shown requests with one more identifier."""
    TAG = "tag"
    """Its keys hold tags of the request: the digest is one."""
    SALT = "salt"
    """Its keys hold the tenant's salt: the digest, which holds it too, takes its place."""
    CHILDREN = "children"
    """It hands requests on to other connectors, each of which is treated as itself."""
    NO_KEY = "no content key"
    """Nothing is looked up by content: it hands one request's state to one other engine, by block numbers, or writes
    what no engine reads back. Refused: nothing compares provenance."""
    REFUSED = "refused"
    """kvprov has no way into its keys, or none that could be tried."""


BOUND: Final = frozenset({Treatment.CHAIN, Treatment.VIEW, Treatment.TAG, Treatment.SALT, Treatment.CHILDREN})


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Attributes:
        treatment: What kvprov does with the connector.
        reason: What its keys are made of, or why it is refused.
        strength: How much of the digest its keys keep; empty when it is refused.
        module: Where the bound class is, under the connector's own name; empty when it is refused.
    """

    treatment: Treatment
    reason: str
    strength: str = ""
    module: str = ""


_CHAIN_STRENGTH: Final = "256 bits: SHA-256 over the digest's text and all tokens up to the block"
_NIXL: Final = (
    "{}; the handshake compares the model's name and its cache's form, but no weights, quantization, adapter or salt"
)
_HERE: Final = "kvprov.engines.vllm"

TABLE: Final[Mapping[str, Entry]] = {
    "ExampleConnector": Entry(
        Treatment.VIEW,
        "folder names hash prompt tokens and content identifiers",
        "128 bits: MD5 over tokens and the digest's text (SHA-256 where the system forbids MD5)",
        f"{_HERE}.example",
    ),
    "HF3FSKVConnector": Entry(
        Treatment.VIEW,
        "keys hash token blocks, each over the one before: bound, the first one hashes the digest, too",
        "256 bits: SHA-256, in place of vLLM's MD5, over the digest's text and all tokens up to the block",
        f"{_HERE}.hf3fs",
    ),
    "OffloadingConnector": Entry(
        Treatment.CHAIN,
        "its tiers look blocks up by hash (fs, obj and p2p were run; kvcr's code was read)",
        _CHAIN_STRENGTH,
        f"{_HERE}.chained",
    ),
    "MooncakeStoreConnector": Entry(Treatment.CHAIN, "keys end in the block hash", _CHAIN_STRENGTH, f"{_HERE}.chained"),
    "SimpleCPUOffloadConnector": Entry(
        Treatment.CHAIN,
        "blocks keep the hash that they have in the engine's own cache",
        _CHAIN_STRENGTH,
        f"{_HERE}.chained",
    ),
    "LMCacheConnectorV1": Entry(
        Treatment.TAG,
        "keys hold tags, of which one is the digest's text, and a hash of tokens, which covers it as well",
        "256 bits: the digest's text in full (128 where so configured), and SHA-256 over it and all tokens",
        f"{_HERE}.lmcache",
    ),
    "LMCacheMPConnector": Entry(
        Treatment.SALT,
        "the server's keys hold the tokens' hash and a salt, whose place the digest's text takes",
        "256 bits: the digest's text in full (128 where so configured)",
        f"{_HERE}.lmcache_mp",
    ),
    "MultiConnector": Entry(
        Treatment.CHILDREN, "each of its connectors is treated as itself", "that of each", f"{_HERE}.multi"
    ),
    "HiSparseConnector": Entry(
        Treatment.REFUSED,
        "it keeps one engine's blocks in that engine's host memory, under block hashes, and shares nothing; it runs on "
        "NVIDIA GPUs only and could not be tried",
    ),
    "NixlConnector": Entry(Treatment.NO_KEY, _NIXL.format("the decoder reads the prefiller's blocks by number")),
    "NixlPullConnector": Entry(Treatment.NO_KEY, _NIXL.format("the decoder reads the prefiller's blocks by number")),
    "NixlPushConnector": Entry(Treatment.NO_KEY, _NIXL.format("the prefiller writes the decoder's blocks by number")),
    "MooncakeConnector": Entry(
        Treatment.NO_KEY, "the decoder is sent the prefiller's blocks by number; nothing but their sizes is compared"
    ),
    "MoRIIOConnector": Entry(
        Treatment.NO_KEY,
        "the decoder reads or is sent the prefiller's blocks by number; nothing but their layout is compared",
    ),
    "DecodeBenchConnector": Entry(
        Treatment.NO_KEY, "it fills the cache with made-up values, for measurements, and calls them computed"
    ),
    "ExampleHiddenStatesConnector": Entry(
        Treatment.NO_KEY,
        "it writes hidden states and tokens into files named by request, for clients; no engine reads them back",
    ),
    "FlexKVConnectorV1": Entry(
        Treatment.REFUSED, "its keys are made in the FlexKV package, which is in no registry and could not be tried"
    ),
}
"""Every connector that vLLM registers. One that is not here is refused, too: a new release's, or somebody else's."""

EXPLICIT_MODULE: Final = "kvprov.engines.vllm.connector"


def bound_names() -> list[str]:
    """Return the names of the connectors that are bound."""
    return [name for name, entry in TABLE.items() if entry.treatment in BOUND]


def bound_class(name: str) -> Any:
    """Return the class to use in place of vLLM's connector `name`, which is bound."""
    try:
        return getattr(importlib.import_module(TABLE[name].module), name)
    except ImportError as error:
        raise BindingError(
            f"The connector {name} cannot be used: {error}.",
            "Install what it needs where the engine runs (for LMCache: pip install 'kvprov[lmcache]').",
        ) from error


def check_shape(parallel_config: Any, connector: str) -> None:
    """Check that a connector's entries are one rank's.

    Raises:
        BindingError: Several ranks would overwrite each other's entries: the connector's keys hold no rank.
    """
    ranks = parallel_config.world_size
    if ranks > 1:
        raise BindingError(
            f"{connector} holds the state of one rank, and this engine has {ranks}: in vLLM, ranks overwrite one file.",
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


def check(name: str, module: str | None) -> Entry:
    """Return the table's entry for a connector.

    Args:
        name: The connector's name.
        module: Where its class is; None or empty for one that vLLM registers.

    Raises:
        BindingError: The connector is not bound.
    """
    ours = not module or module == EXPLICIT_MODULE
    entry = TABLE.get(name) if ours else None
    if entry is None or entry.treatment not in BOUND:
        shown = f"{name} of {module}" if not ours else name
        why = f" ({entry.reason})" if entry is not None else ""
        raise BindingError(
            f"kvprov does not bind the connector {shown}: its entries would be shared without regard to provenance"
            f"{why}.",
            f"Use a connector that kvprov binds ({', '.join(bound_names())}), or set KVPROV_MODE=off to run without "
            "any protection.",
        )
    return entry


def configured(kv_transfer_config: Any) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Give the name, the module and the extra configuration of a connector and of all below it."""
    extra = kv_transfer_config.kv_connector_extra_config or {}
    yield kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_module_path, extra
    yield from _children(extra)


def _children(extra: Mapping[str, Any]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    children = extra.get("connectors", ())
    if not isinstance(children, list | tuple):
        raise _misshapen("connectors", children)
    for child in children:
        if not isinstance(child, Mapping) or not isinstance(child.get("kv_connector"), str):
            raise _misshapen("a member of connectors", child)
        below = child.get("kv_connector_extra_config") or {}
        if not isinstance(below, Mapping):
            raise _misshapen("kv_connector_extra_config", below)
        yield child["kv_connector"], child.get("kv_connector_module_path"), below
        yield from _children(below)


def _misshapen(what: str, value: Any) -> BindingError:
    return BindingError(
        f"The KV transfer configuration cannot be read: {what} is a {type(value).__name__}.",
        'Write {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": NAME, '
        "...}, ...]}}.",
    )


def keyed_by_chain(kv_transfer_config: Any) -> bool:
    """Whether one of the configured connectors keys its entries on the block-hash chain."""
    return kv_transfer_config is not None and any(
        name in TABLE and TABLE[name].treatment is Treatment.CHAIN for name, _, _ in configured(kv_transfer_config)
    )


def reads_client_tags(kv_transfer_config: Any) -> bool:
    """Whether one of the configured connectors would put tags of a request's client into keys."""
    return kv_transfer_config is not None and any(
        name in TABLE and TABLE[name].treatment is Treatment.TAG for name, _, _ in configured(kv_transfer_config)
    )


def wrap_get_connector_class(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `KVConnectorFactory.get_connector_class` that answers with the bound class, or refuses."""

    def get_connector_class(cls: Any, kv_transfer_config: Any) -> Any:
        for name, module, _ in configured(kv_transfer_config):
            check(name, module)
        if kv_transfer_config.kv_connector_module_path:
            return original(kv_transfer_config)
        return bound_class(kv_transfer_config.kv_connector)

    return get_connector_class
