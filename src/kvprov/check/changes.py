"""What a configuration changes in a loaded model: quantized weights, a merged adapter, a narrower view."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvprov.check.errors import CheckError
from kvprov.check.lora import read_adapter, updates

_FP8_MAX: Final = 448.0
_INT8_MAX: Final = 127.0


def _linear(model: Any) -> list[tuple[str, Any]]:
    import torch

    head = model.get_output_embeddings()
    return [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]


def quantize(model: Any, quantization: str) -> None:
    """Round each linear weight to a grid of its own per output channel, as engines hold it, and back to float32."""
    import torch

    layers = _linear(model)
    if not layers:
        raise CheckError("The model has no linear layer to quantize.", "Leave the precision candidates out.")
    for _, layer in layers:
        weight = layer.weight.data
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
        scale /= _FP8_MAX if quantization == "fp8" else _INT8_MAX
        # In place, so that no second copy of the model comes to be.
        weight.div_(scale)
        if quantization == "fp8":
            weight.copy_(weight.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn))
        else:
            weight.round_()
        weight.mul_(scale)


def merge(model: Any, folder: Path) -> None:
    """Add a LoRA adapter to the weights, which gives the state that an engine computes with it beside them.

    Raises:
        CheckError: It is no plain LoRA adapter of this model.
    """
    for name, update in updates(read_adapter(folder), folder):
        try:
            weight = model.get_submodule(name).weight
        except AttributeError as error:
            raise CheckError(
                f"The adapter {folder} changes {name[:120]!r}, which the model has not.",
                "Name an adapter of this model.",
            ) from error
        if weight.shape != update.shape:
            raise CheckError(
                f"The adapter {folder} changes {name!r} by {tuple(update.shape)}, but it has {tuple(weight.shape)}.",
                "Name an adapter of this model.",
            )
        weight.data += update


def window_mask(tokens: int, window: int) -> Any:
    """Return a mask by which each token sees itself and the `window - 1` before it, whatever the model's class does."""
    import torch

    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(1, 1, tokens, tokens).masked_fill_(~seen, torch.finfo(torch.float32).min)
