"""What LMCache's server form puts into keys: a model name, a salt, and what clients may ask of it.

Pure: neither vLLM nor LMCache is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvprov.contract.encoding import lp, u32, u64
from kvprov.contract.key import DigestBits, key_text
from kvprov.identity.canonical import canonical_json

PREFIX: Final = "kvprov-"
"""Stands before every model name, so that none can equal a model's path."""

MAX_OFFLOAD: Final = "lmcache.max_offload_tokens"
"""How many of its tokens a client lets LMCache store."""

_LAYOUT: Final = "kv-lmcache-layout/1"
_INPUTS: Final = "kv-lmcache-inputs/1"


def layout_name(facts: Mapping[str, Any]) -> str:
    """Return the model name for engines whose entries are laid out as `facts` say.

    An LMCache server keeps one layout for each model name and world size, the latest that an engine registered, and
    makes room for entries by it. So engines with entries of different forms need different names, whatever the digest;
    and those of one form need one name, or they could not share.

    Args:
        facts: As JSON could hold them.
    """
    return PREFIX + key_text(hashlib.sha256(lp(_LAYOUT) + lp(canonical_json(facts))).digest(), DigestBits.SHORT)


def salt_text(text: str, media: Sequence[str]) -> str:
    """Return the salt of a request: its digest's text, or a hash of that and of all its media.

    LMCache hashes 31 bits of an item of media for each of its places in the prompt: too few in a chunk in which only
    its first places lie, and none where it takes no place.

    Args:
        text: The digest's text.
        media: Content and place of each item.
    """
    if not media:
        return text
    items = b"".join(lp(item) for item in media)
    return key_text(hashlib.sha256(lp(_INPUTS) + lp(text) + u64(len(media)) + items).digest())


def allowed_options(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what of a client's options for LMCache is passed on: a number of tokens to store at most, or nothing.

    LMCache hands a request's other options to its server, which ignores them. One that is no number would end the
    engine.
    """
    tokens = (options or {}).get(MAX_OFFLOAD)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        return None
    return {MAX_OFFLOAD: tokens}


def spelled(key: Any) -> str:
    """Return a key as LMCache's client sends it, as text: all of it that decides which entries it names.

    Args:
        key: Its `IPCCacheServerKey`. The rank is left out: a lookup asks for all of them.
    """
    tokens = b"".join(u32(token) for token in key.token_ids[: key.end])
    hashed = hashlib.sha256(tokens).hexdigest()
    return f"{key.model_name}@{key.world_size}@{key.start}-{key.end}@{hashed}@{key.cache_salt}"
