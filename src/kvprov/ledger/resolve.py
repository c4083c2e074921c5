"""From what stands in a store, a log or an event to the text of the digest in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvprov.contract.key import MARK
from kvprov.engines.lmcache.keys import MODEL_NAME, TAG
from kvprov.errors import LedgerError
from kvprov.ledger.record import digest_prefix

_ENDINGS: Final = (".data", ".pt", ".tmp")
_REDIS_PARTS: Final = ("kv_bytes", "metadata")
_IDENTIFIER: Final = re.compile(rf"{MARK}:([A-Za-z0-9_-]+)(;.*)?", re.DOTALL)
_HASH: Final = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_BLOCK_FILE: Final = re.compile(r"[0-9a-f]{16,64}\.bin")
_PAGE_FILE: Final = re.compile(r"[0-9a-f]{64}[._].*")

_INSTEAD: Final = (
    "Explain the digest itself: it stands in KV events (docs/kv-events.md), and the worker digest in the engine's "
    "start-up line (worker=...)."
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a key says of its provenance.

    Attributes:
        text: The digest's text.
        form: What kind of key it is, for people.
        rest: What else is in the key: tokens and path facts. Empty for a text alone.
    """

    text: str
    form: str
    rest: str = ""


def resolve(key: str) -> Resolved:
    """Find the digest's text in `key`.

    `key` is a digest's text, a content identifier (`kvprov:TEXT`), or a key or file name of LMCache's server or of
    LMCache within the engine, with or without folders before it.

    Raises:
        LedgerError: There is none in it: it is hashed together with the tokens, or the key is not bound, or is unknown.
    """
    key = key.strip()
    if digest_prefix(key) is not None:
        return Resolved(key, "a digest")
    match = _IDENTIFIER.fullmatch(key)
    if match is not None and digest_prefix(match[1]) is not None:
        return Resolved(match[1], "a content identifier", match[2] or "")
    name = key.rstrip("/").rpartition("/")[2]
    if "@" in name:
        return _lmcache(key, name)
    if _HASH.fullmatch(name):
        raise _hashed(key, "a hash over the digest and the tokens (ExampleConnector, HF3FS, a block of vLLM's chain)")
    if name.endswith(".safetensors"):
        raise _hashed(key, "a file of ExampleConnector, whose folder's name is a hash over the tokens and the digest")
    if _BLOCK_FILE.fullmatch(name):
        raise _hashed(key, "a block of vLLM's hash chain, which starts from the digest")
    if _PAGE_FILE.fullmatch(name):
        raise _hashed(key, "a page of SGLang's hash chain, which starts from the digest")
    raise LedgerError(
        f"{key!r:.120} is neither a digest nor a key that kvprov knows.",
        "Give a digest's text of 43 or 22 characters, or a key or file name of LMCache.",
    )


def _hashed(key: str, what: str) -> LedgerError:
    return LedgerError(f"{key!r:.120} is {what}: no digest can be read from it.", _INSTEAD)


def _unbound(key: str) -> LedgerError:
    return LedgerError(
        f"{key!r:.120} is a key that is not bound: it holds no digest.",
        "An engine without kvprov, or with KVPROV_MODE=off, wrote it.",
    )


def _lmcache(key: str, name: str) -> Resolved:
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    model, *parts = name.split("@")
    if parts[0].startswith("tp_rank:") or any(part.startswith("group:") for part in parts):
        raise _hashed(key, "a key of MooncakeStoreConnector, which ends with a block of vLLM's hash chain")
    tag = f"{TAG}%"
    tags = [part.removeprefix(tag) for part in parts if part.startswith(tag)]
    if model == MODEL_NAME and len(tags) == 1:
        rest = "@".join(part for part in (model, *parts) if not part.startswith(tag))
        for text in (tags[0], *(tags[0].removesuffix(part) for part in _REDIS_PARTS)):
            if digest_prefix(text) is not None:
                return Resolved(text, "a key of LMCache within the engine", rest)
    if model.startswith(f"{MODEL_NAME}-") and len(parts) == 4 and digest_prefix(parts[3]) is not None:
        return Resolved(parts[3], "a key of LMCache's server", "@".join((model, *parts[:3])))
    raise _unbound(key)
