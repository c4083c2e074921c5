"""What inputs of a request hold beside tokens, in pieces that nobody can mistake for those of another one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvprov.contract.encoding import lp, u32, u64

_DEPTH: Final = 16


class UnknownContentError(Exception):
    """Why the content of an input has no identity."""


def _tensor(value: Any) -> Iterator[Any]:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_conj() or value.is_neg():
        raise UnknownContentError("a tensor of a form that is not known")
    data = value.detach().cpu().contiguous()
    yield b"t" + lp(str(value.dtype)) + u32(value.dim()) + b"".join(u64(size) for size in value.shape)
    # Its length follows from element type and shape.
    yield data.reshape(-1).view(torch.uint8).numpy().data


def _array(value: Any) -> Iterator[Any]:
    if value.dtype.hasobject:
        raise UnknownContentError("an array of objects")
    yield b"a" + lp(value.dtype.str) + u32(value.ndim) + b"".join(u64(size) for size in value.shape)
    yield value.tobytes()


def encoded(value: Any, depth: int = 0) -> Iterator[Any]:
    """Give `value` in pieces that nobody can mistake for those of another one.

    Args:
        value: Tensors, arrays, scalars, text and bytes, in lists and mappings.
        depth: How deep `value` lies in another one.

    Raises:
        UnknownContentError: It holds something else.
    """
    import numpy
    import torch

    if depth > _DEPTH:
        raise UnknownContentError("data that is nested too deeply")
    if isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif isinstance(value, numpy.ndarray):
        yield from _array(value)
    elif value is None or isinstance(value, bool):
        yield {None: b"N", False: b"F", True: b"T"}[value]
    elif isinstance(value, int):
        yield b"i" + lp(str(value))
    elif isinstance(value, float):
        yield b"f" + struct.pack(">d", value)
    elif isinstance(value, str):
        yield b"s" + lp(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        yield b"b" + lp(value)
    elif isinstance(value, list | tuple):
        yield b"l" + u64(len(value))
        for item in value:
            yield from encoded(item, depth + 1)
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        yield b"m" + u64(len(value))
        for key in sorted(value):
            yield lp(key.encode("utf-8", "surrogatepass"))
            yield from encoded(value[key], depth + 1)
    else:
        raise UnknownContentError(f"data of type {type(value).__qualname__}")
