"""One name for each element type, whatever an engine or a configuration calls it."""

from __future__ import annotations

from typing import Final

from kvprov.contract.errors import KvprovError

_ALIASES: Final = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "double": "float64",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def canonical_dtype(name: object) -> str:
    """Return the one name of an element type: `torch.bfloat16`, `bf16` and `bfloat16` are `bfloat16`.

    Args:
        name: A name, or an object whose text is one (a torch dtype).

    Raises:
        KvprovError: `name` is "auto" or empty. What auto means depends on the model and the machine, so an identity
            made of it would differ where the state is the same and agree where it is not.
    """
    text = str(name).removeprefix("torch.").lower()
    if text in {"auto", "", "none"}:
        raise KvprovError(
            f"The element type {str(name)!r} is not resolved.",
            "Pass the type that the engine chose, never its wish.",
        )
    return _ALIASES.get(text, text)
