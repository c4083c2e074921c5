"""Every way by which an SGLang worker shares KV state, and what kvprov makes of it: each one is bound or refused."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvprov.errors import BindingError


class Treatment(enum.StrEnum):
    """What is done about a path."""

    NAMESPACE = "namespace"
    """The digest is the namespace in which the path's keys are made."""
    GUARDED = "guarded"
    """As the backend that the guard opens; and refused in a process where binding is not in effect."""
    LOCAL = "shares nothing"
    """No other process reads what it holds, and what it holds is bound within the engine."""
    NO_KEY = "no content key"
    """Nothing is looked up by content: another process hands over one request's state. Refused: nothing compares
    provenance."""
    REFUSED = "refused"
    """Its keys leave the namespace out or cut it, or could not be tried."""


ALLOWED: Final = frozenset({Treatment.NAMESPACE, Treatment.GUARDED, Treatment.LOCAL})


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Attributes:
        treatment: What is done about the path.
        reason: What its keys are made of, or why it is refused.
        strength: How much of the digest its keys keep; empty where there are none, or it is refused.
        one_of: Sizes of the worker's parallel shape that must be 1, since two ranks would write under one name.
    """

    treatment: Treatment
    reason: str
    strength: str = ""
    one_of: tuple[str, ...] = ()

    @property
    def allowed(self) -> bool:
        """Whether an engine may use the path."""
        return self.treatment in ALLOWED


_PAGES: Final = "names hold SGLang's page hash whole, a SHA-256 chain that begins with the namespace{}"
_WHOLE: Final = "256 bits: SHA-256 over the digest's text and all tokens up to the page"
_UNTRIED: Final = "names hold the page hash whole, but {}"

DYNAMIC: Final = "dynamic"
"""The backend whose class the user names. It is not in SGLang's factory."""

BACKENDS: Final[Mapping[str, Entry]] = {
    "file": Entry(Treatment.NAMESPACE, _PAGES.format(""), _WHOLE),
    "mooncake": Entry(
        Treatment.NAMESPACE,
        _PAGES.format("; kvprov adds the parallel sizes (the names were compared; the store was run with vLLM only)"),
        _WHOLE,
        ("attn_cp_size",),
    ),
    "nixl": Entry(
        Treatment.NAMESPACE,
        _PAGES.format(" (the names were compared; not run)"),
        _WHOLE,
        ("pp_size", "attn_cp_size"),
    ),
    "seaweedfs": Entry(Treatment.NAMESPACE, _PAGES.format(" (the names were compared; not run)"), _WHOLE),
    DYNAMIC: Entry(
        Treatment.GUARDED,
        "kvprov's guard, which opens another backend of this table; any other class is refused, since nobody knows "
        "what it makes of names",
        "that of the guarded one",
    ),
    "shm": Entry(
        Treatment.LOCAL, "it stores nothing: the host's pool lies in shared memory, whose places no key names"
    ),
    "hf3fs": Entry(
        Treatment.REFUSED,
        "pages of all sizes go into one file, by number: an engine with pages of another size writes across those that "
        "a name of this one stands for",
    ),
    "aibrix": Entry(
        Treatment.REFUSED,
        "names are made in the aibrix_kvcache package, by a hash that its settings choose, FarmHash among them; it "
        "could not be tried",
    ),
    "eic": Entry(Treatment.REFUSED, _UNTRIED.format("what its client makes of them is not public")),
    "simm": Entry(Treatment.REFUSED, _UNTRIED.format("not how many ranks there are; its client could not be tried")),
    "npu_memcache": Entry(
        Treatment.REFUSED,
        _UNTRIED.format("not how many ranks there are; it runs on Ascend NPUs only and was not tried"),
    ),
    "mori": Entry(Treatment.REFUSED, _UNTRIED.format("its client runs on AMD GPUs only and could not be tried")),
    "tensorcast": Entry(Treatment.REFUSED, "its daemon is handed a SHA-256 of each name; it could not be tried"),
    "sim": Entry(
        Treatment.REFUSED, "it keeps names without state, for measurements, and what it gives back was never computed"
    ),
}
"""Backends of HiCache's third level, by the names that SGLang's factory knows. One that is not here is refused, too."""

_LINKER: Final = (
    "names hold the page hash, but neither the worker's own name nor its parallel sizes as kvprov sets them; it loads "
    "into an accelerator's memory and could not be tried"
)

LINKERS: Final[Mapping[str, Entry]] = {
    "mooncake": Entry(Treatment.REFUSED, _LINKER),
    "mori": Entry(Treatment.REFUSED, _LINKER),
    "dynamic": Entry(Treatment.REFUSED, "nobody knows what a class of somebody else's makes of page hashes"),
}
"""Backends of the unified cache's external linker. One that is not here is refused, too."""


@dataclass(frozen=True, slots=True)
class Option:
    """What an option of SGLang's switches on.

    Attributes:
        name: The option, as it is written.
        entry: What is done about it.
        active: Whether a worker with these `ServerArgs` uses it.
    """

    name: str
    entry: Entry
    active: Callable[[Any], bool]


def _given(field: str, *values: str) -> Callable[[Any], bool]:
    """Return whether an option has one of `values`; without any, whether it is set at all."""

    def active(server_args: Any) -> bool:
        value = getattr(server_args, field, None)
        return str(value) in values if values else bool(value)

    return active


_HANDED_OVER: Final = "{} by the number of a request; weights, quantization, adapter and salt are not compared"
_CPP_TREE: Final = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"


def _has_cpp_tree() -> bool:
    return importlib.util.find_spec("sglang.srt.mem_cache.radix_cache_cpp") is not None


OPTIONS: Final = (
    Option(
        "--enable-hierarchical-cache",
        Entry(
            Treatment.NAMESPACE,
            "device and host go by the namespace and the tokens themselves",
            "the digest's text in full",
        ),
        _given("enable_hierarchical_cache"),
    ),
    Option(
        "--hicache-host-memory-mode buffer_only",
        Entry(
            Treatment.NAMESPACE,
            "the host only passes on; names are those of the storage backend",
            "that of the storage backend",
        ),
        _given("hicache_host_memory_mode", "buffer_only"),
    ),
    Option(
        "--enable-streaming-session, --enable-session-radix-cache",
        Entry(
            Treatment.LOCAL,
            "a session's turns hand on their state in one engine; where their provenance differs, none is kept",
        ),
        lambda args: any(
            getattr(args, field, False) for field in ("enable_streaming_session", "enable_session_radix_cache")
        ),
    ),
    Option(
        "--enable-hisparse",
        Entry(Treatment.LOCAL, "it keeps running requests' state in the host's memory, and needs the prefix cache off"),
        _given("enable_hisparse"),
    ),
    Option(
        "--kv-events-config",
        Entry(Treatment.LOCAL, "events name blocks for routers, by 64 bits of their hashes; no engine looks them up"),
        _given("kv_events_config"),
    ),
    Option(
        "--enable-lmcache",
        Entry(
            Treatment.REFUSED,
            "in 0.5.20 its keys are made of tokens alone; in 0.5.23 they hold the namespace, but it stores every "
            "request's state, also of one that ran while the weights changed",
        ),
        _given("enable_lmcache"),
    ),
    Option(
        "--enable-flexkv",
        Entry(Treatment.REFUSED, "its keys are made of tokens alone"),
        _given("enable_flexkv"),
    ),
    Option(
        "--radix-cache-backend",
        Entry(Treatment.REFUSED, "nobody knows what a cache of somebody else's makes of namespaces"),
        _given("radix_cache_backend"),
    ),
    Option(
        _CPP_TREE,
        Entry(Treatment.REFUSED, "this prefix cache goes by tokens alone, and refuses requests with a salt"),
        lambda _: _has_cpp_tree() and os.environ.get(_CPP_TREE, "").lower() in ("1", "true", "yes", "y"),
    ),
    Option(
        "--disaggregation-mode prefill",
        Entry(Treatment.NO_KEY, _HANDED_OVER.format("a decoder is sent the state")),
        _given("disaggregation_mode", "prefill"),
    ),
    Option(
        "--disaggregation-mode decode",
        Entry(
            Treatment.NO_KEY,
            _HANDED_OVER.format("it takes a prefiller's state")
            + "; its prefix cache and its HiCache would keep that state under its own provenance",
        ),
        _given("disaggregation_mode", "decode"),
    ),
    Option(
        "--enable-pd-role-switch",
        Entry(Treatment.NO_KEY, "it turns the engine into a prefiller or a decoder at run time"),
        _given("enable_pd_role_switch"),
    ),
    Option(
        "--decoupled-spec-role",
        Entry(Treatment.REFUSED, "requests reach the drafter on a way of its own; it could not be tried"),
        _given("decoupled_spec_role", "verifier", "drafter"),
    ),
    Option(
        "--language-only",
        Entry(
            Treatment.NO_KEY,
            "it computes with media that another process has encoded, and keeps by a hash of 64 bits; nothing says "
            "with which weights",
        ),
        _given("language_only"),
    ),
    Option(
        "--elastic-ep-backend",
        Entry(
            Treatment.REFUSED,
            "experts may be lost while it runs, which changes what is computed; its mark on namespaces is not renewed",
        ),
        lambda args: getattr(args, "elastic_ep_backend", None) not in (None, "none"),
    ),
)
"""What else SGLang's options switch on. Options that have nothing to do with sharing are listed in a test."""

_EXTRA: Final = "hicache_storage_backend_extra_config"


def backend_row(name: str) -> str:
    """Return what a backend is called in tables."""
    return f"HiCache storage: {name}"


def rows() -> Iterator[tuple[str, Entry]]:
    """Give every path's name and what is done about it, for tables."""
    for name, entry in BACKENDS.items():
        yield backend_row(name), entry
    for name, entry in LINKERS.items():
        yield f"external linker: {name}", entry
    for option in OPTIONS:
        yield option.name, option.entry


def _backend(server_args: Any) -> str | None:
    backend: str | None = server_args.hicache_storage_backend
    return backend


def _extra_config(server_args: Any) -> dict[str, Any]:
    """Return the backend's extra configuration; empty where it is in a file, which is read when the backend is made."""
    try:
        found = json.loads(getattr(server_args, _EXTRA, None) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _opened(backend: str, extra_config: Mapping[str, Any] | None) -> str:
    """Return the name of the backend that is opened: where the guard stands, of the one that it guards.

    Raises:
        BindingError: The guard's configuration names none.
    """
    from kvprov.engines.sglang import guard

    return guard.inner_of(extra_config or {})[0] if guard.is_guard(backend, extra_config) else backend


def describe(server_args: Any) -> str:
    """Return the path of a worker in a few words, for the start-up line."""
    backend = _backend(server_args)
    if backend is None:
        return "hicache" if server_args.enable_hierarchical_cache else "local"
    inner = _opened(backend, _extra_config(server_args))
    return f"hicache:{inner}" if inner == backend else f"hicache:guard:{inner}"


_BOUND: Final = ", ".join(name for name, entry in BACKENDS.items() if entry.treatment is Treatment.NAMESPACE)


def _refuse(what: str, reason: str, instead: str) -> BindingError:
    return BindingError(
        f"kvprov does not bind {what}: KV state would be shared without regard to provenance ({reason}).",
        f"{instead}, or set KVPROV_MODE=off to run without any protection.",
    )


def check_backend(backend: str, extra_config: Mapping[str, Any] | None) -> Entry:
    """Return what is done about a backend of HiCache's third level.

    Args:
        backend: Its name.
        extra_config: Its extra configuration.

    Raises:
        BindingError: It is not bound.
    """
    name = _opened(backend, extra_config)
    entry = BACKENDS.get(name)
    if entry is None or not entry.allowed or name == DYNAMIC:
        reason = "kvprov does not know it" if entry is None else entry.reason
        raise _refuse(f"the HiCache storage backend {name!r}", reason, f"Use one that kvprov binds ({_BOUND})")
    return entry


def check(server_args: Any) -> None:
    """Refuse what cannot be bound, before a model is loaded.

    Args:
        server_args: SGLang's `ServerArgs`.

    Raises:
        BindingError: A path that this worker is to share state by is not bound.
    """
    for option in OPTIONS:
        if option.active(server_args) and not option.entry.allowed:
            raise _refuse(option.name, option.entry.reason, f"Do without {option.name}")
    if getattr(server_args, "enable_unified_cache_external_linker", False):
        linker = server_args.unified_cache_external_linker_backend
        entry = LINKERS.get(linker)
        raise _refuse(
            f"the external linker {linker!r}",
            "kvprov does not know it" if entry is None else entry.reason,
            f"Use HiCache with a storage backend that kvprov binds ({_BOUND})",
        )
    backend, extra_config = _backend(server_args), _extra_config(server_args)
    # The class of a dynamic backend may be named in a file.
    if backend is not None and not (backend == DYNAMIC and not extra_config):
        check_backend(backend, extra_config)


def shape(config: Any) -> str:
    """Return what stands in names for the sizes of a worker's parallel shape; empty for one rank.

    Ranks are in the names that backends make. Sizes are not in all of them: the first of two ranks would read what the
    first of four has written, which holds other heads.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
    """
    # Where ranks hold the same state, as with MLA, their number does not matter. With `tp_lcm_size`, names go by parts
    # of that many.
    heads = 1 if config.is_mla_model else config.tp_lcm_size or config.tp_size
    sizes = {
        "tp": heads,
        "pp": config.pp_size,
        "cp": config.attn_cp_size,
        "dcp": getattr(config, "dcp_size", 1),
    }
    return "".join(f"-{name}{size}" for name, size in sizes.items() if size > 1)


def wrap_create_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `StorageBackendFactory.create_backend` that refuses what is not bound, also at run time."""

    def create_backend(cls: Any, backend_name: str, storage_config: Any, *args: Any, **kwargs: Any) -> Any:
        from kvprov.engines.sglang import guard

        # The guard itself comes here only where nobody has opened the inner one for it, and refuses on its own.
        if not guard.is_guard(backend_name, storage_config.extra_config):
            entry = check_backend(backend_name, storage_config.extra_config)
            for size in entry.one_of:
                if getattr(storage_config, size) > 1:
                    raise _refuse(
                        f"the HiCache storage backend {backend_name!r} with {size} {getattr(storage_config, size)}",
                        "several ranks would write under one name",
                        f"Let {size} be 1, or use the backend file",
                    )
        return original(backend_name, storage_config, *args, **kwargs)

    return create_backend
