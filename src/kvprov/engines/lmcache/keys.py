"""Keys of LMCache's in-process form: `model@world@worker@hash@dtype@tag%value`, bound to provenance.

    kvprov@WORLD@WORKER@HASH@DTYPE@kvprov%TEXT

The model's name gives way to a constant: what it stands for is in the digest, whose text is the tag. HASH is 256 bits
wide and covers the tokens, the text and the path facts, so whatever looks at the hash alone (events, folders, caches
of what is present) is bound as well, and no mapping of other characters to one can make two keys meet.

Pure: neither vLLM nor LMCache is imported here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvprov.contract.encoding import lp, u64

MODEL_NAME: Final = "kvprov"
"""Stands where LMCache has the model's name or path."""

TAG: Final = "kvprov"
"""The name of the tag whose value is the digest's text."""

TAG_PREFIX: Final = "lmcache.tag."
SKIP_SAVE: Final = "lmcache.skip_save"
CONFIGS: Final = "kv_transfer_params"

WIRE_BYTES: Final = 150
"""Room for a key in a message to LMCache's own server (`lm://`)."""

TEXT_LENGTHS: Final[Mapping[int, int]] = {256: 43, 128: 22}
"""Characters of a digest's text, by its bits."""

_CHAIN: Final = "kv-lmcache-tokens/1"
_CHUNK: Final = "kv-lmcache-chunk/1"
_MEDIA: Final = "kv-lmcache-media/1"


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What shapes one rank's entry and is in no key of LMCache's.

    World size, rank and the cache's element type are in its keys already.

    Attributes:
        tensor_parallel: Ranks that share a layer; 1 where they all hold the same and one of them stores it.
        pipeline_parallel: Ranks that share the layers.
        context_parallel: Ranks that share the tokens, at prefill and at decode.
        layers: Layers of one rank.
        planes: 2 for keys and values, 1 for one compressed vector.
        heads: Key-value heads of one rank.
        head_size: Elements of one head.
        serde: How LMCache writes an entry (`naive`, `cachegen`).
    """

    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: tuple[int, int]
    layers: int
    planes: int
    heads: int
    head_size: int
    serde: str

    def encode(self) -> bytes:
        """Return the facts as bytes, the same on every worker of the same shape."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def chain_start() -> bytes:
    """Return what the hash of a first chunk continues."""
    return hashlib.sha256(lp(_CHAIN)).digest()


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of all tokens up to the end of a chunk: SHA-256 over the former hash and the chunk's tokens.

    It takes the place of LMCache's own, which keeps 64 bits, by default of Python's `hash`, which is neither collision
    resistant nor the same in two processes. A token takes 8 bytes, big-endian.
    """
    words = array("q", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return hashlib.sha256(previous + words.tobytes()).digest()


def chunk_hash(facts: bytes, text: str, tokens: bytes) -> int:
    """Return the hash that stands in a key.

    Args:
        facts: The path facts, encoded.
        text: The tag's value.
        tokens: The chain's hash at the end of the chunk.
    """
    digest = hashlib.sha256(lp(_CHUNK) + lp(facts) + lp(text) + lp(tokens)).digest()
    return int.from_bytes(digest, "big")


def tag_text(text: str, media: Iterable[tuple[str, int, int]]) -> str:
    """Return the value of a request's tag: the digest's text, or where there are media, a hash of it and of them.

    LMCache puts 31 bits of a medium's identifier in place of each of its tokens. A chunk that ends within a medium may
    hold one such token only, and a client could search for a medium that meets another there.

    Args:
        text: The digest's text.
        media: Identifier, first token and number of tokens of each.
    """
    items = [
        lp(identifier.encode("utf-8", "surrogatepass")) + u64(offset) + u64(length)
        for identifier, offset, length in media
    ]
    if not items:
        return text
    digest = hashlib.sha256(lp(_MEDIA) + lp(text) + u64(len(items)) + b"".join(items)).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()[: len(text)]


def text_of(configs: Mapping[str, Any] | None) -> str | None:
    """Return the tag's value among what LMCache is handed for a request, or None where it is not ours alone."""
    tags = {name: value for name, value in (configs or {}).items() if name.startswith(TAG_PREFIX)}
    value = tags.pop(TAG_PREFIX + TAG, None)
    return value if isinstance(value, str) and value and not tags else None


@dataclass(frozen=True, slots=True)
class ClientParameters:
    """What a client says to LMCache in a request.

    Attributes:
        tags: Its own tags. They enter the digest, and no key.
        skip_save: Whether it wants nothing of the request stored.
        problem: Why its tags cannot be told; empty when they can. Nothing is guessed: such a request bypasses.
    """

    tags: Mapping[str, str] = field(default_factory=dict)
    skip_save: bool = False
    problem: str = ""


def client_parameters(extra_args: Any) -> ClientParameters:
    """Read what a client may say: tags of text, whose names and values may be any, and `lmcache.skip_save`.

    Everything else is left out. LMCache 0.5.6 reads nothing else of a request in its in-process form, but would hand
    any `lmcache.tag.*` on to keys, and `disagg_spec` to a transfer between engines.

    Args:
        extra_args: Of the request's sampling parameters; anything that a client could send.
    """
    configs = extra_args.get(CONFIGS) if isinstance(extra_args, Mapping) else None
    if not isinstance(configs, Mapping):
        return ClientParameters()
    tags = {}
    for name, value in configs.items():
        if isinstance(name, str) and name.startswith(TAG_PREFIX):
            if not isinstance(value, str):
                return ClientParameters(problem=f"a tag's value is no text but {type(value).__name__}")
            tags[name.removeprefix(TAG_PREFIX)] = value
    return ClientParameters(tags, configs.get(SKIP_SAVE) is True)


def request_configs(text: str, skip_save: bool) -> dict[str, Any]:
    """Return what LMCache is handed for a request: the tag, and nothing of the client's but its wish not to store."""
    configs: dict[str, Any] = {TAG_PREFIX + TAG: text}
    if skip_save:
        configs[SKIP_SAVE] = True
    return configs


def longest_key(world_size: int, dtype: str, text_length: int) -> int:
    """Return how many bytes the longest key of an engine has: its last rank's, of a hash without leading zeros."""
    key = f"{MODEL_NAME}@{world_size}@{max(world_size - 1, 0)}@{'f' * 64}@{dtype}@{TAG}%{'_' * text_length}"
    return len(key.encode())
