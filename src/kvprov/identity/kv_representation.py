"""The kv_representation dimension: how KV state is laid out as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvprov.contract.descriptor import Known
from kvprov.identity.canonical import config_identity
from kvprov.identity.dtypes import canonical_dtype


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV state has one form.

    Attributes:
        kind: "attention" for keys and values of each head, "latent" for one compressed vector.
        layers: How many layers have it.
        element: Element type in which the state is stored.
        encoding: What the elements mean, where the stored type does not say it (`fp8_e5m2` held as `uint8`);
            "auto" means the stored type itself.
        kv_heads: Key-value heads over all ranks.
        head_size: Elements of one key head.
        head_size_v: Elements of one value head.
    """

    kind: str
    layers: int
    element: str
    encoding: str
    kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True, slots=True)
class KvRepresentation:
    """Resolved KV representation of one worker.

    Attributes:
        groups: The groups of layers.
        layout: The engine's name for the order of layers, blocks, heads and tokens in memory.
        packing: The form of one layer's block, as the attention backend lays it out.
    """

    groups: Sequence[LayerGroup]
    layout: str
    packing: str


def kv_representation(facts: KvRepresentation) -> Known:
    """Return the identity of `facts`; the order of groups does not matter.

    Raises:
        KvprovError: An element type is not resolved.
    """
    groups = []
    for group in facts.groups:
        element = canonical_dtype(group.element)
        groups.append(
            {
                "kind": group.kind,
                "layers": group.layers,
                "element": element,
                "encoding": element if group.encoding == "auto" else canonical_dtype(group.encoding),
                "kv_heads": group.kv_heads,
                "head_size": group.head_size,
                "head_size_v": group.head_size_v,
            }
        )
    return Known(
        config_identity(
            {
                "groups": sorted(groups, key=lambda group: tuple(str(value) for value in group.values())),
                "layout": facts.layout,
                "packing": facts.packing,
            }
        )
    )
