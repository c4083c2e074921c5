"""The precision dimension: how weights are quantized, and in which types they are held and computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvprov.contract.descriptor import Known
from kvprov.identity.canonical import config_identity
from kvprov.identity.dtypes import canonical_dtype


@dataclass(frozen=True, slots=True)
class Precision:
    """Resolved precision of one worker.

    Attributes:
        weight_dtype: Element type of weights that are not quantized.
        compute_dtype: Element type of activations.
        quantization: The method that quantizes the weights, or None.
        parameters: Its parameters, as the engine resolved them.
        adapter_dtype: Element type in which adapters are held, or None for `compute_dtype`.
    """

    weight_dtype: str
    compute_dtype: str
    quantization: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    adapter_dtype: str | None = None


def precision(facts: Precision) -> Known:
    """Return the identity of `facts`.

    Aliases of one element type give one identity, and an adapter type equal to the compute type gives that of none.

    Raises:
        KvprovError: A type is "auto", or a parameter has no canonical form.
    """
    compute = canonical_dtype(facts.compute_dtype)
    adapter = compute if facts.adapter_dtype is None else canonical_dtype(facts.adapter_dtype)
    return Known(
        config_identity(
            {
                "weight_dtype": canonical_dtype(facts.weight_dtype),
                "compute_dtype": compute,
                "quantization": facts.quantization,
                "parameters": dict(facts.parameters) if facts.quantization else {},
                "adapter_dtype": adapter,
            }
        )
    )
