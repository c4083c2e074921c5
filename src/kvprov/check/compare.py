"""How one entry differs from another, for whoever would read it instead of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvprov.check.prefill import State
from kvprov.check.space import Representation
from kvprov.check.stored import Entry, read, store


@dataclass(frozen=True, slots=True)
class Place:
    """Where two states differ most.

    Attributes:
        layer: Which layer, from 0.
        head: Which key-value head, from 0.
        token: Which token of the prompt, from 0.
        part: `keys` or `values`.
    """

    layer: int
    head: int
    token: int
    part: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How the writer's entry differs from the reader's own.

    Attributes:
        equal: Whether the bytes of the two entries are the same.
        readable: Whether the reader takes the writer's bytes for an entry of its own, by their number or their header.
        largest: Largest absolute difference between what it would read and its own state; infinite where it would
            read no number. None when it cannot read the entry.
        place: Where that is; None when nothing differs or the entry cannot be read.
        tokens: How many tokens of the prompt have a difference. All of them when the entry cannot be read.
        layers: Largest absolute difference of each layer.
    """

    equal: bool
    readable: bool
    largest: float | None
    place: Place | None
    tokens: int
    layers: tuple[float, ...]


def compare(written: Entry, own: Entry, state: State, representation: Representation) -> Difference:
    """Compare an entry with the one that its reader would have written.

    Args:
        written: The writer's entry.
        own: The reader's entry of the same prompt.
        state: The reader's state in float32, which gives the shapes.
        representation: The reader's.
    """
    if written.layers == own.layers:
        return Difference(True, True, 0.0, None, 0, (0.0,) * len(own.layers))
    count = state.layers[0][0].shape[1]
    foreign = read(written, state, representation)
    if foreign is None:
        return Difference(False, False, None, None, count, ())
    mine = read(own, state, representation)
    assert mine is not None
    return _difference(foreign, mine, count)


def _difference(foreign: State, mine: State, count: int) -> Difference:
    import torch

    affected = torch.zeros(count, dtype=torch.bool)
    layers: list[float] = []
    place, largest = None, 0.0
    for index, (theirs, ours) in enumerate(zip(foreign.layers, mine.layers, strict=True)):
        in_layer = 0.0
        for part, a, b in zip(("keys", "values"), theirs, ours, strict=True):
            # No number differs from every number, and from itself: nobody can compute with it.
            difference = torch.nan_to_num((a - b).abs(), nan=math.inf, posinf=math.inf)
            affected |= (difference > 0).any(dim=2).any(dim=0)
            most = float(difference.max())
            in_layer = max(in_layer, most)
            if most > largest:
                head, token, _ = (int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
                place, largest = Place(index, head, token, part), most
        layers.append(in_layer)
    return Difference(False, True, largest, place, int(affected.sum()), tuple(layers))


def difference(writer: tuple[State, Representation], reader: tuple[State, Representation]) -> Difference:
    """Compare what a writer would store with what a reader would, each of its own state and representation."""
    return compare(store(*writer), store(*reader), *reader)
