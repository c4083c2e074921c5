"""Block hashes as a bound vLLM computes them: for who follows its KV events, or routes requests to where state is.

Nothing of vLLM is imported. The hash of a block covers its parent's hash, its tokens and its extra keys; in a bound
engine the first block's extra keys hold the text of the request's digest, and an adapter's name or a salt nowhere.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, TypeAlias

from kvprov.contract.descriptor import ABSENT, Known, Value
from kvprov.contract.digest import Digester
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.key import DigestBits, chain_entry, key_text
from kvprov.contract.registry import Registry
from kvprov.errors import EventError

DEFAULT_SEED: Final = "vllm-none-hash"
"""What the root of all chains is made of, unless the engine's PYTHONHASHSEED is set: then it is that."""

BlockKey: TypeAlias = bytes | int
"""A block's hash as events show it: whole, or its low 64 bits, which is vLLM's default."""

_TEXT: Final = re.compile(r"[A-Za-z0-9_-]{22}|[A-Za-z0-9_-]{43}")
_LOW: Final = (1 << 64) - 1


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _head(major: int, n: int) -> bytes:
    if n < 24:
        return bytes([major << 5 | n])
    size = next(size for size in (1, 2, 4, 8) if n < 1 << 8 * size)
    return bytes([major << 5 | {1: 24, 2: 25, 4: 26, 8: 27}[size]]) + n.to_bytes(size, "big")


def _cbor(value: object) -> bytes:
    """Return canonical CBOR (RFC 8949) of what block hashes are made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return _head(3, len(raw)) + raw
    if isinstance(value, tuple):
        return _head(4, len(value)) + b"".join(map(_cbor, value))
    raise EventError(f"A block hash is not made of a {type(value).__name__}.", "Pass tokens and keys as events do.")


_ENCODERS: Final[Mapping[str, Callable[[object], bytes]]] = {"sha256": _pickled, "sha256_cbor": _cbor}


def external(block: bytes) -> int:
    """Return a block's hash as events show it by default: its low 64 bits."""
    return int.from_bytes(block, "big") & _LOW


def tagged(keys: Sequence[Any] | None) -> tuple[tuple[Any, ...], ...] | None:
    """Return the extra keys of a block, as its hash covers them, from those that an event of a bound engine shows.

    Raises:
        EventError: They are not those of a bound engine.
    """
    found: list[tuple[Any, ...]] = []
    for key in keys or ():
        if isinstance(key, bytes):
            found.append(("prompt_embeds", key))
        elif isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str):
            # A pickle shows whether two equal texts are one object. In an engine they never are.
            found.append(("mm", key[0].encode().decode(), key[1]))
        elif isinstance(key, str) and _TEXT.fullmatch(key):
            found.append(chain_entry(key))
        else:
            raise EventError(
                "An event shows an extra key that no bound engine publishes.",
                "Follow engines with kvprov in effect only: an unbound one publishes salts and adapters' names here.",
            )
    return tuple(found) or None


class BlockHasher:
    """Computes the hashes of blocks.

    Args:
        algorithm: The engine's `--prefix-caching-hash-algo`: `sha256` (its default; Python's pickle is inside) or
            `sha256_cbor` (for who computes these hashes in another language).
        seed: The engine's PYTHONHASHSEED, where that is set.

    Raises:
        EventError: The algorithm is not one that kvprov lets stand in keys.
    """

    def __init__(self, algorithm: str = "sha256", seed: str = DEFAULT_SEED) -> None:
        if algorithm not in _ENCODERS:
            raise EventError(
                f"Block hashes of kind {algorithm!r} cannot be computed.", f"Use one of {', '.join(_ENCODERS)}."
            )
        self._encode = _ENCODERS[algorithm]
        self.root = self._hash(seed)

    def _hash(self, value: object) -> bytes:
        return hashlib.sha256(self._encode(value)).digest()

    def block(self, parent: bytes | None, tokens: Sequence[int], keys: Sequence[Any] | None = None) -> bytes:
        """Return the hash of one block.

        Args:
            parent: The whole hash of the block before it; None for the first one.
            tokens: Its tokens.
            keys: Its extra keys, as events show them.

        Raises:
            EventError: `keys` are not those of a bound engine.
        """
        return self._hash((parent or self.root, tuple(tokens), tagged(keys)))

    def prompt(self, tokens: Sequence[int], block_size: int, text: str) -> list[bytes]:
        """Return the hashes of all whole blocks of a prompt of tokens alone.

        Args:
            tokens: The prompt.
            block_size: How many tokens a block holds.
            text: The text of the request's digest (see `digest_text`).

        Raises:
            EventError: `text` is not a digest's.
        """
        blocks: list[bytes] = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            keys = None if blocks else [text]
            blocks.append(self.block(blocks[-1] if blocks else None, tokens[start : start + block_size], keys))
        return blocks

    def stored(self, event: Mapping[str, Any], known: MutableMapping[BlockKey, bytes]) -> list[bytes]:
        """Return the whole hashes of the blocks of a `BlockStored` event, recomputed from what it shows.

        Args:
            event: The event, as msgpack decodes it without a schema.
            known: The whole hash of each block that was seen, by what events show of it; those of this event are added.

        Raises:
            EventError: The event's parent is not known, or a hash is not what the event says.
        """
        parent: bytes | None = None
        if event["parent_block_hash"] is not None:
            parent = known.get(event["parent_block_hash"])
            if parent is None:
                raise EventError(
                    "A block was stored whose parent was not seen.",
                    "Ask the engine's replay endpoint for the events that were missed.",
                )
        size, tokens = event["block_size"], event["token_ids"]
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        blocks: list[bytes] = []
        for index, said in enumerate(event["block_hashes"]):
            parent = self.block(parent, tokens[index * size : (index + 1) * size], keys[index])
            if said not in (parent, external(parent)):
                raise EventError(
                    "A block's hash is not what its event says it is made of.",
                    "Check algorithm and seed; and that the engine is bound, hashes whole blocks (one size for all "
                    "layers), and the event is of the engine's own cache.",
                )
            blocks.append(parent)
        known.update(zip(event["block_hashes"], blocks, strict=True))
        return blocks


def digest_text(
    worker: Mapping[str, str],
    request: Mapping[str, str] = {},
    *,
    bits: DigestBits = DigestBits.FULL,
    registry: Registry = BUILT_IN,
) -> str:
    """Return the text of a request's digest, as it enters the first block's extra keys.

    Args:
        worker: The identity of each dimension of the worker half, as the engine announces them when it starts.
        request: The identities of the request half's dimensions that apply: of the adapter (`identify_adapter`,
            `kvprov identify`), of the salt (`sharing_domain`). Others are absent.
        bits: The engine's KVPROV_DIGEST_BITS.
        registry: The dimensions that the engine binds.

    Raises:
        ContractError: `worker` lacks a dimension of the registry, or one of the two has another one.
    """
    values: dict[str, Value] = dict.fromkeys(registry.request, ABSENT)
    values |= {name: Known(identity) for name, identity in request.items()}
    digester = Digester(registry, {name: Known(identity) for name, identity in worker.items()})
    return key_text(digester.digest(values), bits)
