"""KV state as the entry that would be stored, and as a reader takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvprov.check.prefill import State
from kvprov.check.space import Representation

_DTYPES: Final = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """What one run stores of its prompt.

    Attributes:
        layers: The bytes of each layer.
    """

    layers: tuple[bytes, ...]


def _dtype(representation: Representation) -> Any:
    import torch

    return getattr(torch, _DTYPES[representation.element])


def _laid_out(tensor: Any, representation: Representation) -> Any:
    """Turn [heads, tokens, head size] into the layout's order of axes, and back: the two are one exchange."""
    return tensor.transpose(0, 1) if representation.layout == "NHD" else tensor


def _raw(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def store(state: State, representation: Representation) -> Entry:
    """Return the entry of `state`."""
    import torch

    dtype = _dtype(representation)
    range_ = torch.finfo(dtype)
    layers = []
    for pair in state.layers:
        # Engines saturate: what is beyond the range becomes its largest number, not an infinity.
        cast = [_laid_out(t.clamp(range_.min, range_.max), representation).to(dtype).contiguous() for t in pair]
        if representation.serialization == "safetensors":
            from safetensors.torch import save

            layers.append(save({"keys": cast[0], "values": cast[1]}))
        else:
            layers.append(_raw(cast[0]) + _raw(cast[1]))
    return Entry(tuple(layers))


def read(entry: Entry, like: State, representation: Representation) -> State | None:
    """Return the state that a worker of some representation reads from an entry, or None when it cannot read it.

    Args:
        entry: What somebody stored.
        like: State of the shapes that the reader expects.
        representation: The reader's own.
    """
    import torch

    dtype = _dtype(representation)
    layers = []
    for data, pair in zip(entry.layers, like.layers, strict=True):
        shapes = [_laid_out(tensor, representation).shape for tensor in pair]
        if representation.serialization == "safetensors":
            tensors = _unpacked(data)
            if tensors is None or [t.shape for t in tensors] != shapes:
                return None
        else:
            sizes = [shape.numel() * dtype.itemsize for shape in shapes]
            if len(data) != sum(sizes):
                return None
            # A copy, since torch wants memory that may be written to.
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = (flat[: sizes[0]].clone(), flat[sizes[0] :].clone())
            tensors = [part.view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]
        layers.append(tuple(_laid_out(tensor.float(), representation) for tensor in tensors))
    return State(tuple((keys, values) for keys, values in layers))


def _unpacked(data: bytes) -> list[Any] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = load(data)
    except SafetensorError:
        return None
    return [found["keys"], found["values"]] if found.keys() == {"keys", "values"} else None
