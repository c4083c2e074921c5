"""KV state by transformers on the CPU in float32: the same numbers each time a configuration runs."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprov.check.changes import merge, quantize, window_mask
from kvprov.check.errors import CheckError
from kvprov.check.fields import ROTARY_BASE, WINDOW, merged, rotary_bases, set_rotary_base
from kvprov.check.packages import need_packages, quiet, release_memory, threads
from kvprov.identity.checkpoint import select_files


@dataclass(frozen=True, slots=True)
class State:
    """The KV state of a prompt.

    Attributes:
        layers: Keys and values of each layer, each a float32 tensor of [heads, tokens, head size].
    """

    layers: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What shapes the KV state of one run.

    Attributes:
        weights: The checkpoint whose tensors are loaded.
        config: Fields of the model's configuration to replace.
        quantization: How linear weights are quantized, or None.
        adapter: The adapter's folder, or None.
    """

    weights: Path
    config: Mapping[str, object]
    quantization: str | None
    adapter: Path | None


class Model:
    """A model whose configuration is read once, and whose weights are loaded for each run.

    Args:
        folder: The checkpoint.

    Raises:
        MissingPackageError: See `need_packages`.
        CheckError: transformers cannot read the configuration.
        KvprovError: The folder holds no checkpoint in safetensors.
    """

    def __init__(self, folder: Path) -> None:
        need_packages()
        from transformers import AutoConfig

        self.folder = folder
        self._bytes = sum(path.stat().st_size for path in select_files(folder))
        with quiet():
            try:
                self._config = AutoConfig.from_pretrained(folder, local_files_only=True)
            except (OSError, ValueError, KeyError) as error:
                raise CheckError(
                    f"transformers cannot read the configuration of {folder}: {str(error).rstrip('.')}.",
                    "Name a checkpoint that transformers knows; code that a checkpoint brings is not run.",
                ) from error

    @property
    def _text(self) -> Any:
        return self._config.get_text_config()

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return int(self._text.vocab_size)

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids that mean something else than text."""
        found: set[int] = set()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self._text, name, None)
            found.update(value if isinstance(value, list) else [value] if value is not None else [])
        return frozenset(found)

    @property
    def dtype(self) -> str:
        """The checkpoint's element type, as its configuration has it."""
        dtype = getattr(self._text, "dtype", None) or getattr(self._config, "dtype", None)
        return str(dtype or "float32").removeprefix("torch.")

    @property
    def architecture(self) -> str:
        """The class that computes the state."""
        return str((self._config.architectures or [type(self._config).__name__])[0])

    @property
    def rotary_base(self) -> float | None:
        """The base of the rotary embedding, or None where the model has none."""
        found = rotary_bases(self._config.to_dict())
        return found[0] if found else None

    def config(self, replaced: Mapping[str, object]) -> Any:
        """Return the configuration with fields replaced, as transformers resolves it.

        `rope_theta` is replaced wherever this release of transformers and this model keep it. A table is merged into
        the table that is there.

        Raises:
            CheckError: The model has no rotary base to replace, or transformers refuses a value.
        """
        fields = self._config.to_dict()
        for name, value in replaced.items():
            if name == ROTARY_BASE:
                if not set_rotary_base(fields, value):
                    raise CheckError(f"{self.folder} has no rotary base to replace.", "Leave that candidate out.")
            else:
                fields[name] = merged(fields.get(name), value)
        if WINDOW in replaced and "use_sliding_window" in fields:
            # Such a model forgets its window unless it is told to use it, in all layers.
            fields |= {"use_sliding_window": True, "max_window_layers": 0}
            fields.pop("layer_types", None)
        with quiet():
            try:
                return type(self._config).from_dict(fields)
            except (ValueError, TypeError, KeyError) as error:
                raise CheckError(
                    f"transformers refuses the configuration with {dict(replaced)}: {error}.", "Correct the candidate."
                ) from error

    def resolved(self, replaced: Mapping[str, object]) -> dict[str, object]:
        """Return the configuration with fields replaced, as plain data."""
        plain: dict[str, object] = json.loads(self.config(replaced).to_json_string(use_diff=False))
        return plain

    def run(self, run: Run, tokens: tuple[int, ...]) -> State:
        """Load the weights, prefill the prompt, and return the state. Nothing of the run is kept.

        Raises:
            CheckError: The model cannot be loaded, an adapter does not fit, or the state is not keys and values.
        """
        import torch

        config = self.config(run.config)
        try:
            with torch.inference_mode(), threads(self._bytes):
                model = self._load(run.weights, config)
                if run.quantization is not None:
                    quantize(model, run.quantization)
                if run.adapter is not None:
                    merge(model, run.adapter)
                window = run.config.get(WINDOW)
                return _prefill(model, tokens, window if isinstance(window, int) else None)
        finally:
            # A model refers to itself: without this, the next one would be loaded beside it.
            model = None
            gc.collect()
            release_memory()

    def _load(self, weights: Path, config: Any) -> Any:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        with quiet():
            try:
                model, loaded = AutoModelForCausalLM.from_pretrained(
                    weights,
                    config=config,
                    dtype=torch.float32,
                    attn_implementation="eager",
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    # Nothing is generated; without one, a folder that has none either is refused.
                    generation_config=GenerationConfig(),
                )
            except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
                raise CheckError(
                    f"transformers cannot load {weights}: {str(error)[:500].rstrip('.')}.",
                    "Name a causal language model in safetensors of the shape that the configuration says.",
                ) from error
        if missing := sorted(loaded["missing_keys"]):
            # transformers would fill them with random numbers, others in each run.
            raise CheckError(
                f"{weights} lacks the tensor {missing[0][:120]!r}"
                + (f" and {len(missing) - 1} others." if missing[1:] else "."),
                "Name a whole checkpoint.",
            )
        return model.eval()


def _prefill(model: Any, tokens: tuple[int, ...], window: int | None) -> State:
    import torch
    from transformers import DynamicCache

    body = getattr(model, model.base_model_prefix, model)
    options = {} if window is None else {"attention_mask": window_mask(len(tokens), window)}
    # Without a configuration it keeps every token of every layer, also of those that attend to a window only.
    result = body(torch.tensor([tokens]), past_key_values=DynamicCache(), use_cache=True, **options)
    cache = result.past_key_values
    layers: list[tuple[Any, Any]] = []
    for layer in getattr(cache, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != len(tokens):
            layers.clear()
            break
        layers.append((keys[0].clone(), values[0].clone()))
    if not layers:
        raise CheckError(
            "The model keeps state that is not keys and values of each token.", "The offline check cannot judge it."
        )
    return State(tuple(layers))
