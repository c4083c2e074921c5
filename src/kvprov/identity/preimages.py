"""Preimages of configuration identities, kept so that they can be explained.

An identity is a hash and cannot be read. Whoever makes one of a configuration leaves the bytes that it hashed here, and
whoever records identities (the ledger) takes them from here. Nothing in this module takes part in an identity.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

MAX_KEPT: Final = 256
MAX_BYTES: Final = 1 << 20
"""Most bytes of one preimage. The largest model configurations have some tens of thousands."""

_kept: OrderedDict[str, bytes] = OrderedDict()
_lock: Final = threading.Lock()


def keep(identity: str, preimage: bytes) -> None:
    """Keep `preimage` for `identity`, unless it is too large. The oldest of more than `MAX_KEPT` is forgotten."""
    if len(preimage) > MAX_BYTES:
        return
    with _lock:
        _kept[identity] = preimage
        _kept.move_to_end(identity)
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)


def preimage_of(identity: str) -> bytes | None:
    """Return what `identity` was made of in this process, or None where that is not kept."""
    with _lock:
        return _kept.get(identity)
