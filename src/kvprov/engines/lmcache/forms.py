"""Forms of LMCache's in-process engine: which are bound, and which are refused because they drop or cut a key.

Pure: a configuration is any object with LMCache's settings as attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvprov.errors import BindingError

REFUSED: Final[Mapping[str, str]] = {
    "use_layerwise": "stores and loads layer by layer, where LMCache leaves a request's tags out of its keys",
    "enable_blending": "blends chunks of other prompts, which are found without a request's tags",
    "enable_async_loading": "sends lookups in messages that hold hashes of 64 bits",
    "enable_controller": "reports entries to a controller by a hash of 64 bits and without tags",
    "enable_p2p": "asks other engines for chunks by a hash of 64 bits and without tags",
    "enable_pd": "hands state from one engine to another, and asks for it without tags",
    "pd_bidirectional": "asks the decoding engine what it has without tags",
    "external_lookup_client": "asks a Mooncake store whether entries exist, without tags",
    "enable_hidden_state_cache": "keeps hidden states under keys without tags",
    "enable_scheduler_bypass_lookup": "lets the scheduler read the tier itself; it could not be tried",
    "internal_api_server_enabled": "serves requests that store, load and clear by tokens, which name no provenance",
    "gds_path": "writes by GPUDirect storage; it could not be tried",
    "maru_path": "keeps entries in a Maru pool; it could not be tried",
    "storage_plugins": "keeps entries in somebody else's backend, whose keys kvprov does not know",
}
"""Settings that must be off, and what each does."""

REFUSED_EXTRA: Final[Mapping[str, str]] = {
    "enable_nixl_storage": "remembers by hash alone which entries exist; it could not be tried",
}
"""The same, of `extra_config`."""

REMOTE: Final = (
    *("lm://", "redis://", "rediss://", "unix://", "redis-sentinel://", "redis-cluster://", "resp://", "valkey://"),
    *("fs://", "hf3fs://", "s3://", "azure://", "mooncakestore://", "infinistore://"),
)
"""Remote stores that name entries by the whole key. `lm`, `redis` and `fs` were run; the others' code was read."""

REMOTE_PLUGINS: Final = frozenset({"redis", "fs", "hf3fs", "mooncakestore"})
"""The same, of `remote_storage_plugins`, where the plugin is LMCache's own."""


_READ: Final = ("remote_url", "remote_storage_plugins", "extra_config", "chunk_size", "save_unfull_chunk")


def problems(config: Any) -> Iterator[tuple[str, str]]:
    """Give each setting of `config` that is refused, and why."""
    extra = getattr(config, "extra_config", None) or {}
    for name, reason in REFUSED.items():
        if getattr(config, name, None):
            yield name, reason
    for name, reason in REFUSED_EXTRA.items():
        if extra.get(name):
            yield f"extra_config.{name}", reason
    url = getattr(config, "remote_url", None)
    if url and not str(url).startswith(REMOTE):
        yield "remote_url", f"names a store of a kind whose keys kvprov does not know ({str(url).split('://')[0][:32]})"
    for plugin in getattr(config, "remote_storage_plugins", None) or ():
        own = not extra.get(f"remote_storage_plugin.{plugin}.module_path")
        if not own or str(plugin).split(".")[0] not in REMOTE_PLUGINS:
            yield "remote_storage_plugins", f"names {plugin}, whose keys kvprov does not know"


def check(config: Any, connector: str = "LMCacheConnectorV1") -> None:
    """Check that every key of an engine will be bound.

    Args:
        config: LMCache's configuration, with what vLLM's extra configuration adds to it.
        connector: The connector's name, for the error.

    Raises:
        BindingError: A form is configured in which LMCache would make keys that are not bound.
    """
    for name in (*REFUSED, *_READ):
        if not hasattr(config, name):
            raise BindingError(
                f"This release of LMCache has no setting {name}, so that it cannot be told whether every key is bound.",
                "Install a release of LMCache that this release of kvprov supports (kvprov[lmcache]), or set "
                "KVPROV_MODE=off to run without any protection.",
            )
    found = list(problems(config))
    if found:
        name, reason = found[0]
        more = f" ({', '.join(other for other, _ in found[1:])} as well)" if found[1:] else ""
        raise BindingError(
            f"{connector} is configured with {name}, which {reason}. kvprov cannot bind that.",
            f"Leave {name} out of LMCache's configuration{more}, or use the connector LMCacheMPConnector, or set "
            "KVPROV_MODE=off to run without any protection.",
        )
