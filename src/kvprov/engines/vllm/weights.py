"""Worker side: the identity of the weights that were loaded, whatever happens to their files meanwhile.

The loader is handed the very files that are hashed: each is opened once, hashed through that descriptor, and passed on
as `/proc/self/fd/N`, so that a file, a link or a folder swapped at the path is not seen. What is left is a write into
the open file itself, which `OpenCheckpoint.recheck` finds after the load.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvprov.contract.errors import KvprovError
from kvprov.engines.vllm.log import logger
from kvprov.identity.checkpoint import OpenCheckpoint, combined_identity, open_files
from kvprov.identity.digest_cache import default_cache

_ATTRIBUTE = "_kvprov_weights"
_INITIAL_NAMES = "_kvprov_weight_names"
_LOADS = "_kvprov_direct_loads"
_LOADED_NAMES = "_kvprov_loaded_names"
_current = threading.local()


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What is known of a model's weights.

    Attributes:
        identity: The identity of the tensors that were read, or None.
        reason: Why there is none.
        names: The names of these tensors.
    """

    identity: str | None
    reason: str = ""
    names: frozenset[str] = frozenset()


class _Recorder:
    """Follows one model's load."""

    def __init__(self) -> None:
        self.prefix = ""
        self.parts: list[OpenCheckpoint] = []
        self.reason = ""

    def follow(self, loader: Any) -> None:
        """Note who reads. A class that derives from vLLM's loader may give other tensors than it reads."""
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        if type(loader) is not DefaultModelLoader:
            self.reason = f"the loader {type(loader).__name__} is not followed"

    def pin(self, files: list[str]) -> list[str]:
        """Open `files` and return the paths under which the loader shall read them."""
        try:
            part = open_files(files, prefix=self.prefix)
            self.parts.append(part)
            for file in part.files:
                # Before the load, not only before the hashing: a write in between would not show in the stamp if it
                # fell in one tick of the clock with the last one, or went through a memory map with dirty pages.
                file.settle()
        except KvprovError as error:
            self.reason = error.message
            return files
        return part.fd_paths

    def finish(self) -> LoadedWeights:
        if self.reason:
            return LoadedWeights(None, self.reason)
        if not self.parts:
            return LoadedWeights(None, "no safetensors files were read")
        try:
            identified = combined_identity(self.parts, cache=default_cache())
            for part in self.parts:
                part.recheck()
            names = frozenset(tensor.name for part in self.parts for tensor in part.tensors())
        except KvprovError as error:
            return LoadedWeights(None, error.message)
        return LoadedWeights(identified.identity, names=names)

    def close(self) -> None:
        for part in self.parts:
            part.close()


@contextmanager
def _recording() -> Iterator[_Recorder]:
    outer = getattr(_current, "recorder", None)
    recorder = _Recorder()
    _current.recorder = recorder
    try:
        yield recorder
    finally:
        _current.recorder = outer
        recorder.close()


def wrap_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DefaultModelLoader.load_weights` that also notes what it loaded on the model."""

    def load_weights(self: Any, model: Any, model_config: Any) -> Any:
        with _recording() as recorder:
            recorder.follow(self)
            result = original(self, model, model_config)
            loaded = recorder.finish()
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
        with _recording() as recorder:
            result = original(self, *args, **kwargs)
            loaded = recorder.finish()
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
        recorder: _Recorder | None = getattr(_current, "recorder", None)
        if recorder is not None:
            recorder.prefix = source.prefix
            recorder.follow(self)
        return original(self, source)

    return get_weights_iterator


def wrap_safetensors_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an iterator over safetensors files that reads the files which are hashed."""

    def safetensors_iterator(hf_weights_files: list[str], *args: Any, **kwargs: Any) -> Any:
        recorder: _Recorder | None = getattr(_current, "recorder", None)
        files = hf_weights_files if recorder is None else recorder.pin(hf_weights_files)
        return original(files, *args, **kwargs)

    return safetensors_iterator


def wrap_pickle_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an iterator over pickled files that notes why their content has no identity."""

    def pickle_iterator(*args: Any, **kwargs: Any) -> Any:
        recorder: _Recorder | None = getattr(_current, "recorder", None)
        if recorder is not None:
            recorder.reason = "the weights are pickled files, which kvprov never reads"
        return original(*args, **kwargs)

    return pickle_iterator


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
