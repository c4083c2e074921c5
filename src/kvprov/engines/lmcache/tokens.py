"""LMCache's token database, bound: the one place where its in-process form makes keys of tokens.

Importing this imports LMCache, which must not happen before vLLM creates the connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvprov.engines.lmcache import keys
from kvprov.errors import BindingError


class BoundTokenDatabase(ChunkedTokenDatabase):  # type: ignore[misc]
    """A token database whose hashes are 256 bits wide and whose keys are bound, or are not made.

    Hashes on their own (a lookup sends them from the scheduler to the workers) are bytes, since messages hold whole
    numbers of 64 bits at most. In keys they are whole numbers, as LMCache's own are.

    Args:
        native: The database that LMCache made. It decides what a chunk is.
        facts: What shapes an entry and is in no key of LMCache's.
    """

    def __init__(self, native: Any, facts: keys.PathFacts) -> None:
        # Not its own start: that would set vLLM's hash of an absent parent anew.
        self.__dict__.update(vars(native))
        self._kvprov_facts = facts.encode()

    def _get_init_hash(self) -> bytes:
        return keys.chain_start()

    def _hash_tokens(self, tokens: Any, prefix_hash: Any = None, extra_keys: Any = None) -> bytes:
        del extra_keys
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        return keys.chain(keys.chain_start() if prefix_hash is None else prefix_hash, values)

    def _make_key_by_hash(self, chunk_hash: Any, request_configs: Mapping[str, Any] | None = None) -> Any:
        """Return the key of a chunk.

        Raises:
            BindingError: Whoever asks names no provenance, or not this one's form of it.
        """
        text = keys.text_of(request_configs)
        if text is None or not isinstance(chunk_hash, bytes):
            raise BindingError(
                "LMCache asked for a key without provenance; none is made.",
                "Remove what asks for entries by their tokens alone: an offload or API client of this engine.",
            )
        return CacheEngineKey(
            keys.MODEL_NAME,
            1 if self.save_only_first_rank else self.metadata.world_size,
            self.metadata.worker_id,
            keys.chunk_hash(self._kvprov_facts, text, chunk_hash),
            self.metadata.kv_dtype,
            dict(request_configs or {}),
        )
