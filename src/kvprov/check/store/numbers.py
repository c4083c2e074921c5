"""Elements as numbers, to say how far two entries are apart. numpy does the work, and is imported when there is any."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvprov.contract.errors import KvprovError
from kvprov.errors import StoreError
from kvprov.identity.dtypes import canonical_dtype

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTHS: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of an element, by the name of its type."""

_SAFETENSORS: Final = {"i8": "int8", "u8": "uint8", "f64": "float64", "f8_e4m3": "fp8_e4m3", "f8_e5m2": "fp8_e5m2"}


def element_type(name: str | None) -> str | None:
    """Return the one name of an element type that `difference` knows, or None for any other."""
    if name is None:
        return None
    try:
        found = canonical_dtype(_SAFETENSORS.get(name.lower(), name))
    except KvprovError:
        return None
    return found if found in WIDTHS else None


def require_numpy() -> None:
    """Check that differences can be computed.

    Raises:
        StoreError: numpy is not installed.
    """
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise StoreError(
            "A tolerance needs numpy, which is not installed.", "Install it: pip install 'kvprov[check]'."
        ) from error


@cache
def _fp8_e4m3() -> NDArray[np.float64]:
    import numpy as np

    def value(byte: int) -> float:
        exponent, fraction = byte >> 3 & 15, byte & 7
        if exponent == 15 and fraction == 7:
            return math.nan
        size = math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)
        return -size if byte & 128 else size

    return np.array([value(byte) for byte in range(256)])


def _decoders() -> dict[str, Callable[[Any], Any]]:
    import numpy as np

    return {
        "bfloat16": lambda raw: (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4"),
        "float16": lambda raw: np.frombuffer(raw, "<f2"),
        "float32": lambda raw: np.frombuffer(raw, "<f4"),
        "float64": lambda raw: np.frombuffer(raw, "<f8"),
        "fp8_e4m3": lambda raw: _fp8_e4m3()[np.frombuffer(raw, "u1")],
        "fp8_e5m2": lambda raw: (np.frombuffer(raw, "u1").astype("<u2") << 8).view("<f2"),
        "int8": lambda raw: np.frombuffer(raw, "i1"),
        "uint8": lambda raw: np.frombuffer(raw, "u1"),
    }


def difference(first: bytes, second: bytes, dtype: str) -> tuple[float, int] | None:
    """Return the largest absolute difference of two rows of elements, and how many differ; None without numpy.

    Elements of equal bytes do not differ, whatever they are. What is not a number differs infinitely from any other.

    Args:
        first: Little-endian elements.
        second: As many others.
        dtype: One of `WIDTHS`.
    """
    try:
        import numpy as np
    except ImportError:
        return None
    decode, width = _decoders()[dtype], f"<u{WIDTHS[dtype]}"
    differs = np.frombuffer(first, width) != np.frombuffer(second, width)
    if not differs.any():
        return 0.0, 0
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = (decode(raw)[differs].astype(np.float64) for raw in (first, second))
        apart = np.abs(one - other)
    return float(np.where(np.isnan(apart), np.inf, apart).max()), int(differs.sum())
