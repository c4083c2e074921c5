"""A HiCache backend that stands for another one, and exists only where keys are bound.

SGLang goes on without a plugin that it cannot load, as when `SGLANG_PLUGINS` does not name it, and logs that at most.
This class is named by SGLang's own configuration, so SGLang comes to it in any case. Where binding is in effect, the
controller opens the inner backend in its place (see `storage.wrap_attach`): nothing stands between the two. Where it is
not, there is nobody to do so, and the engine does not start.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvprov",
        "module_path": "kvprov.engines.sglang.guard", "class_name": "Guard", "inner": "file"}'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvprov.errors import BindingError
from kvprov.settings import Mode, load_settings

BACKEND: Final = "dynamic"
MODULE: Final = __name__
CLASS: Final = "Guard"
INNER: Final = "inner"
"""Member of the extra configuration that names the backend to open."""

_OWN: Final = frozenset({"backend_name", "module_path", "class_name", INNER})


def is_guard(backend: str, extra_config: Mapping[str, Any] | None) -> bool:
    """Whether this configuration names the guard."""
    return backend == BACKEND and (extra_config or {}).get("module_path") == MODULE


def inner_of(extra_config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the backend that the guard stands for, and its own extra configuration.

    Raises:
        BindingError: It names none.
    """
    inner = extra_config.get(INNER)
    if not isinstance(inner, str) or inner == BACKEND:
        raise BindingError(
            "The guard's configuration does not say which backend it guards.",
            'Add "inner": "file", or another of SGLang\'s own, to hicache-storage-backend-extra-config.',
        )
    return inner, {name: value for name, value in extra_config.items() if name not in _OWN}


class Guard(HiCacheStorage):  # type: ignore[misc]
    """Refuses: it is only ever made where binding is not in effect.

    Raises:
        BindingError: Always.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:  # noqa: D102 - see the class
        if load_settings().mode is Mode.OFF:
            raise BindingError(
                "KVPROV_MODE is off, and kvprov guards this engine's HiCache storage.",
                "Name the inner backend itself, or let KVPROV_MODE be enforce.",
            )
        raise BindingError(
            "kvprov guards this engine's HiCache storage and is not in effect in this process.",
            "Let SGLANG_PLUGINS be unset or name kvprov, and look in the log for why the plugin was not loaded.",
        )
