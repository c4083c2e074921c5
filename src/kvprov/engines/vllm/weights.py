"""Worker side: what vLLM's loader reads, and what reloads and trainers put in its place."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from kvprov.engines.loading import LoadedWeights, Recorder, recorder, recording
from kvprov.engines.vllm.log import logger

_ATTRIBUTE = "_kvprov_weights"
_INITIAL_NAMES = "_kvprov_weight_names"
_LOADS = "_kvprov_direct_loads"
_LOADED_NAMES = "_kvprov_loaded_names"


def _follow(current: Recorder, loader: Any) -> None:
    """Note who reads. A class that derives from vLLM's loader may give other tensors than it reads."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    if type(loader) is not DefaultModelLoader:
        current.reason = f"the loader {type(loader).__name__} is not followed"


def wrap_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DefaultModelLoader.load_weights` that also notes what it loaded on the model."""

    def load_weights(self: Any, model: Any, model_config: Any) -> Any:
        with recording() as current:
            _follow(current, self)
            result = original(self, model, model_config)
            loaded = current.finish()
        if loaded.identity is None:
            logger.warning("kvprov: the weights of %s are not identified: %s.", model_config.model, loaded.reason)
        setattr(model, _ATTRIBUTE, loaded)
        setattr(model, _INITIAL_NAMES, loaded.names)
        return result

    return load_weights


def direct_loads(model: Any) -> int:
    """Return how often weights were given to `model` by its own method since `count_direct_loads`, by whomever."""
    return int(getattr(model, _LOADS, 0))


def count_direct_loads(model: Any) -> None:
    """Notice what trainers do that share the engine's process: they call the model's own method.

    Doing it twice changes nothing.
    """
    if "load_weights" in vars(model) or not hasattr(type(model), "load_weights"):
        return

    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _LOADS, direct_loads(self) + 1)
        loaded = type(self).load_weights(self, *args, **kwargs)
        setattr(self, _LOADED_NAMES, loaded)
        return loaded

    # A method, so that a copy of the model gets one of its own.
    model.load_weights = types.MethodType(load_weights, model)


def _is_complete(model: Any, loaded: LoadedWeights, quantization: Any) -> bool:
    """Whether what was reloaded is all that the model holds. vLLM only warns of what is not there, and keeps it."""
    before = getattr(model, _INITIAL_NAMES, None)
    if before:
        return bool(loaded.names == before)
    # It was not loaded from files at first. This is how vLLM itself checks; it cannot where weights are quantized.
    names = getattr(model, _LOADED_NAMES, None)
    if quantization is not None or not isinstance(names, set | frozenset):
        return False
    return {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} <= names


def wrap_reload_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Worker.reload_weights` that notes on the model what it holds afterwards."""
    parameters = ("weights_iterator", "weights_path", "is_checkpoint_format")

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = dict(zip(parameters, args, strict=False)) | kwargs
        model = self.get_model()
        setattr(model, _ATTRIBUTE, LoadedWeights(None, "reloading the weights failed"))
        with recording() as current:
            result = original(self, *args, **kwargs)
            loaded = current.finish()
        if asked.get("weights_iterator") is not None:
            # It may read files, and then give something else.
            loaded = LoadedWeights(None, "they were given by an iterator")
        elif not asked.get("is_checkpoint_format", True):
            loaded = LoadedWeights(None, "they were reloaded from another format than a checkpoint's")
        elif loaded.identity is not None and not _is_complete(model, loaded, self.model_config.quantization):
            loaded = LoadedWeights(None, "it is not known whether all weights were reloaded")
        elif loaded.identity is not None:
            setattr(model, _INITIAL_NAMES, loaded.names)
        setattr(model, _ATTRIBUTE, loaded)
        return result

    return reload_weights


def wrap_get_weights_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DefaultModelLoader._get_weights_iterator` that notes the prefix of the source being read."""

    def get_weights_iterator(self: Any, source: Any) -> Any:
        if (current := recorder()) is not None:
            current.prefix = source.prefix
            _follow(current, self)
        return original(self, source)

    return get_weights_iterator


def loaded_weights(model: Any, load_format: str) -> LoadedWeights:
    """Return what is known of `model`'s weights.

    Args:
        model: The model that the worker runs.
        load_format: How it was loaded, for the reason when nothing is known.
    """
    loaded = getattr(model, _ATTRIBUTE, None)
    if isinstance(loaded, LoadedWeights):
        return loaded
    return LoadedWeights(None, f"the load format {load_format!r} is not followed")
