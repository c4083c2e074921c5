"""Tensors that an engine holds, named and hashed as safetensors files name and hold them."""

from __future__ import annotations

from typing import Any, Final

from kvprov.errors import KvprovError
from kvprov.identity.tensors import Tensor

_DTYPES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Torch's element types, as safetensors names them. Source: safetensors 0.8, `safetensors/torch.py`."""


def tensor_of(name: str, value: Any) -> Tensor:
    """Return the content of a torch tensor: what `hash_file` returns for a file that holds it.

    Args:
        name: Its name in the checkpoint.
        value: The tensor, on any device.

    Raises:
        KvprovError: Its element type has no name in safetensors.
    """
    import torch
    from blake3 import blake3

    dtype = _DTYPES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None:
        raise KvprovError(
            f"The tensor {name[:80]!r} has the element type {value.dtype}, which safetensors does not know.",
            "Declare a label for the weights.",
        )
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    # Of nothing there is no view as bytes.
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return Tensor(name, dtype, tuple(value.shape), blake3(data, max_threads=blake3.AUTO).digest())
