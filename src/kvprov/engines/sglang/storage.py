"""The store: its entries are named by content, and what nobody else could read is not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvprov.engines.sglang import paths

PRIVATE: Final = "private:"
"""Stands before the digest of requests whose provenance is not known. The engine's own levels keep their state."""

SERVED_NAME: Final = "kvprov"
"""Stands in entries' names where SGLang puts the name under which a model is served. Names alias after SGLang has
replaced their slashes, and one model has many; the digest says what the model is."""


def is_private(namespace: str | None) -> bool:
    """Whether the state in this namespace is of no use to anybody else."""
    return namespace is not None and namespace.startswith(PRIVATE)


def wrap_attach(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `HiCacheController.attach_storage_backend` that opens what the guard stands for in the guard's place."""

    def attach_storage_backend(
        self: Any,
        storage_backend: str,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
    ) -> Any:
        from kvprov.engines.sglang import guard

        if guard.is_guard(storage_backend, storage_backend_extra_config):
            storage_backend, storage_backend_extra_config = guard.inner_of(storage_backend_extra_config or {})
        return original(self, storage_backend, prefetch_threshold, model_name, storage_backend_extra_config)

    return attach_storage_backend


def wrap_generate_storage_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `HiCacheController._generate_storage_config` that goes by no name of the model."""

    def generate_storage_config(self: Any, model_name: Any = None, *args: Any, **kwargs: Any) -> Any:
        del model_name
        config = original(self, SERVED_NAME, *args, **kwargs)
        config.model_name += paths.shape(config)
        return config

    return generate_storage_config


def wrap_write_backup_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `UnifiedRadixCache.write_backup_storage` that writes no entries which nobody could find."""

    def write_backup_storage(self: Any, node_id: Any) -> Any:
        namespace, _ = self.tree_core.prefetch_anchor_info(node_id)
        return None if is_private(namespace) else original(self, node_id)

    return write_backup_storage


def wrap_prefetch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler._prefetch_kvcache` that looks nothing up which cannot be there."""

    def prefetch(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        return None if is_private(req.extra_key) else original(self, req, *args, **kwargs)

    return prefetch
