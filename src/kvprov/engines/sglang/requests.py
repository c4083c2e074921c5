"""Requests: stamped when they are made, and barred from the prefix cache when nobody may have what they compute."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from kvprov.contract.key import NONCE_BYTES
from kvprov.engines.sglang import current
from kvprov.engines.sglang.stamp import Stamp, set_stamp, stamp_of
from kvprov.engines.sglang.storage import PRIVATE

_BARRED = "skip_radix_cache_insert"
_NO_EPOCH = -1


def _own_namespace(request: Any) -> str | None:
    """Return the namespace that the client asked for: SGLang appends the adapter's handle to it."""
    namespace: str | None = request.extra_key
    if namespace is None or request.lora_id is None:
        return namespace
    return namespace.removesuffix(request.lora_id) or None


def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Req.__init__` that stamps the request."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        binding = current.binding()
        namespace, salt = _own_namespace(self), self.cache_salt
        if binding is None:
            # One of the engine's own, made while it starts.
            text = f"{PRIVATE}{secrets.token_hex(NONCE_BYTES)}"
            reason = "start: the engine is not complete yet"
            set_stamp(self, Stamp(text, _NO_EPOCH, reason, barred=True, namespace=namespace, salt=salt))
        else:
            binding.stamp(self, namespace, salt)

    return init


def wrap_init_next_round_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Req.init_next_round_input` that renews a stamp which the worker has outgrown, before it is looked up."""

    def init_next_round_input(self: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> Any:
        binding = current.binding()
        if binding is not None and tree_cache is not None:
            binding.renew(self)
        return original(self, tree_cache, *args, **kwargs)

    return init_next_round_input


def wrap_rebootstrap_payload(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Req.build_rebootstrap_payload` with what the client sent: the other engine makes a stamp of its own."""

    def build_rebootstrap_payload(self: Any) -> Any:
        payload = original(self)
        stamp = stamp_of(self)
        if stamp is not None:
            payload["extra_key"], payload["cache_salt"] = stamp.namespace, stamp.salt
        return payload

    return build_rebootstrap_payload


class Barred:
    """`Req.skip_radix_cache_insert`: what SGLang sets, or that the request's state belongs to nobody's key.

    SGLang asks it whenever it may put a request's state into the prefix cache, from where it reaches host and store.
    So a request that ran while the weights changed is barred without anybody having to find it.
    """

    def __get__(self, request: Any, owner: type | None = None) -> Any:
        if request is None:
            return self
        if vars(request).get(_BARRED, False):
            return True
        binding = current.binding()
        return binding is None or not binding.keeps(request)

    def __set__(self, request: Any, value: bool) -> None:
        vars(request)[_BARRED] = value


def install_bar() -> None:
    """Let every request of SGLang ask whether it may be kept."""
    from sglang.srt.managers.schedule_batch import Req

    Req.skip_radix_cache_insert = Barred()
