"""One worker and one request, as plain facts, and the ways in which the audit changes one fact of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final


def _text(what: str, index: int) -> str:
    """Return a name that no other index has: long, so that keys which hold it as it is are seen to hold all of it."""
    return hashlib.sha256(f"{what} {index}".encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, as files and as a request names it.

    Attributes:
        name: What requests call it.
        folder: Where its files are, below the audit's folder.
        content: Which bytes they hold; equal numbers, equal bytes.
        handle: The engine's number for it, which says in which order adapters were loaded.
    """

    name: str = "adapter"
    folder: str = "adapters"
    content: int = 0
    handle: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one worker and one of its requests are.

    Attributes:
        model_folder: The folder that holds the model's folder, below the audit's folder.
        model_name: The name of the model's folder.
        served_name: What clients call the model.
        weights: Which bytes the checkpoint's tensors hold; equal numbers, equal bytes.
        quantization: How the engine quantizes weights when it loads them; empty for not at all.
        compute_dtype: Element type of weights and of what is computed.
        rope_theta: The rotary base, in the model's configuration.
        sliding_window: The attention window, in the model's configuration; 0 for none.
        kv_element: Element type of the KV cache.
        kv_layout: Order in memory of the KV cache: `HND` or `NHD`.
        adapter: The request's adapter, or None.
        salt: The tenant's salt; empty for none.
        namespace: The client's own namespace; empty for none.
        prompt: Which tokens the prompt holds; equal numbers, equal tokens.
    """

    model_folder: str = "models"
    model_name: str = "model"
    served_name: str = "served"
    weights: int = 0
    quantization: str = ""
    compute_dtype: str = "bfloat16"
    rope_theta: float = 10000.0
    sliding_window: int = 0
    kv_element: str = "bfloat16"
    kv_layout: str = "HND"
    adapter: Adapter | None = Adapter()
    salt: str = _text("salt", 0)
    namespace: str = _text("namespace", 0)
    prompt: int = 0

    def worker(self) -> Scenario:
        """Return the scenario of the same worker without a request's facts: equal for all requests of one worker."""
        return replace(self, adapter=None, salt="", namespace="", prompt=0)


BASE: Final = Scenario()

_WITHOUT: Final[Mapping[str, Mapping[str, object]]] = {
    "adapter": {"adapter": None},
    "sharing_domain": {"salt": ""},
    "client_namespace": {"namespace": ""},
}


def without(scenario: Scenario, dimension: str) -> Scenario:
    """Return the scenario of a path that has no place for `dimension`; the same one where a worker always has it."""
    return replace(scenario, **_WITHOUT.get(dimension, {}))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Fact:
    """One way to change one fact, all others fixed.

    Attributes:
        dimension: The dimension that it belongs to.
        name: What is changed, for people.
        vary: Gives the base with another value, by a number from 0 on. Different numbers, different values.
        values: How many other values there are; 0 where there is any number.
        carrier: For what says nothing of state or permission itself, but which keys may hold in its place: `name`,
            `path` or `handle`. Empty for the fact itself.
    """

    dimension: str
    name: str
    vary: Callable[[Scenario, int], Scenario]
    values: int = 0
    carrier: str = ""


def _adapter(scenario: Scenario, **changes: object) -> Scenario:
    if scenario.adapter is None:
        return scenario
    return replace(scenario, adapter=replace(scenario.adapter, **changes))  # type: ignore[arg-type]


FACTS: Final[tuple[Fact, ...]] = (
    Fact("weights", "tensors", lambda s, i: replace(s, weights=i + 1)),
    Fact("weights", "folder", lambda s, i: replace(s, model_folder=_text("models", i)), carrier="path"),
    Fact("weights", "last part of the path", lambda s, i: replace(s, model_name=_text("model", i)), carrier="name"),
    Fact("weights", "served name", lambda s, i: replace(s, served_name=_text("served", i)), carrier="name"),
    Fact("precision", "quantization", lambda s, i: replace(s, quantization="fp8_per_channel"), 1),
    Fact("precision", "compute dtype", lambda s, i: replace(s, compute_dtype="float16"), 1),
    Fact("model_config", "rope_theta", lambda s, i: replace(s, rope_theta=20000.0 + i)),
    Fact("model_config", "sliding_window", lambda s, i: replace(s, sliding_window=64 + i)),
    Fact("kv_representation", "element", lambda s, i: replace(s, kv_element="float16"), 1),
    Fact("kv_representation", "layout", lambda s, i: replace(s, kv_layout="NHD"), 1),
    Fact("adapter", "tensors", lambda s, i: _adapter(s, content=i + 1)),
    Fact("adapter", "presence", lambda s, i: replace(s, adapter=None), 1),
    Fact("adapter", "name", lambda s, i: _adapter(s, name=_text("adapter", i)), carrier="name"),
    Fact("adapter", "path", lambda s, i: _adapter(s, folder=_text("adapters", i)), carrier="path"),
    Fact("adapter", "handle", lambda s, i: _adapter(s, handle=i + 2), carrier="handle"),
    Fact("sharing_domain", "salt", lambda s, i: replace(s, salt=_text("salt", i + 1))),
    Fact("sharing_domain", "presence", lambda s, i: replace(s, salt=""), 1),
    Fact("client_namespace", "namespace", lambda s, i: replace(s, namespace=_text("namespace", i + 1))),
    Fact("client_namespace", "presence", lambda s, i: replace(s, namespace=""), 1),
)
"""Every change that the audit makes. Each dimension has one fact at least that is no carrier."""

DIMENSIONS: Final = tuple(dict.fromkeys(fact.dimension for fact in FACTS))
