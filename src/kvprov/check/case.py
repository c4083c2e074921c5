"""What a key function is shown: one request of one worker, with the provenance that kvprov would bind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvprov.contract.descriptor import Descriptor
from kvprov.contract.digest import digest
from kvprov.contract.key import DigestBits, content_identifier, key_text
from kvprov.contract.registry import Registry
from kvprov.identity.kv_representation import KvRepresentation
from kvprov.identity.precision import Precision


@dataclass(frozen=True, slots=True)
class Case:
    """One request of one worker.

    Attributes:
        tokens: Token ids of the prompt.
        model: Folder of the checkpoint.
        adapter: Folder of the request's LoRA adapter, or None.
        salt: The tenant's salt, or None.
        namespace: The client's namespace, or None.
        config: The model's resolved configuration.
        precision: Resolved precision.
        representation: Resolved KV representation.
        registry: The dimensions that are bound: all that are declared, less those withheld.
        descriptor: The request's provenance, over that registry: identities of the content of these folders.
        bits: How much of the digest enters keys.
    """

    tokens: tuple[int, ...]
    model: Path
    adapter: Path | None
    salt: str | None
    namespace: str | None
    config: Mapping[str, object]
    precision: Precision
    representation: KvRepresentation
    registry: Registry
    descriptor: Descriptor
    bits: DigestBits = DigestBits.FULL

    @property
    def adapter_name(self) -> str | None:
        """What the adapter's folder is called, or None."""
        return None if self.adapter is None else self.adapter.name

    @property
    def digest(self) -> bytes:
        """The digest of the descriptor, 32 bytes.

        Raises:
            ContractError: A value is not known: such a request would bypass the tier.
        """
        return digest(self.registry, self.descriptor)

    @property
    def bound(self) -> str:
        """The text by which kvprov binds the digest where a connector hashes content identifiers."""
        return content_identifier(key_text(self.digest, self.bits))
