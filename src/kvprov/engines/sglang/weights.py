"""What SGLang's loader reads, and what updates put in its place."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvprov.contract.errors import KvprovError
from kvprov.engines.loading import LoadedWeights, Recorder, recorder, recording
from kvprov.engines.sglang.log import logger
from kvprov.engines.torch_tensors import tensor_of
from kvprov.identity.tensors import Tensor, tensors_digest, tensors_identity

_ATTRIBUTE = "_kvprov_weights"


@dataclass
class _Models:
    """What this process has loaded.

    Attributes:
        drafts: The models that draft for another one.
        updating: Whether what models are given is to be identified by its content.
    """

    drafts: list[Any] = field(default_factory=list)
    updating: bool = False


_models = _Models()


def _follow(current: Recorder, loader: Any) -> None:
    """Note who reads. A class that derives from SGLang's loader may give other tensors than it reads."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if type(loader) is not DefaultModelLoader:
        current.reason = f"the loader {type(loader).__name__} is not followed"


def _note(model: Any, loaded: LoadedWeights, source: object) -> None:
    if loaded.identity is None:
        logger.warning("kvprov: the weights of %s are not identified: %s.", source, loaded.reason)
    model.__dict__[_ATTRIBUTE] = loaded
    _watch(model)


def wrap_load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DefaultModelLoader.load_model` that also notes what it loaded on the model."""

    def load_model(self: Any, *, model_config: Any, device_config: Any) -> Any:
        with recording() as current:
            _follow(current, self)
            model = original(self, model_config=model_config, device_config=device_config)
            loaded = current.finish()
        _note(model, loaded, model_config.model_path)
        if model_config.is_draft_model:
            _models.drafts.append(model)
        return model

    return load_model


def wrap_commit_model_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DefaultModelLoader.commit_model_weights`, by which weights follow a model that was made empty."""

    def commit_model_weights(self: Any, **arguments: Any) -> Any:
        with recording() as current:
            _follow(current, self)
            result = original(self, **arguments)
            loaded = current.finish()
        _note(arguments["model"], loaded, arguments["model_config"].model_path)
        return result

    return commit_model_weights


def wrap_get_weights_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `DefaultModelLoader._get_weights_iterator` that notes the prefix of the source being read."""

    def get_weights_iterator(self: Any, source: Any, **arguments: Any) -> Any:
        if (current := recorder()) is not None:
            current.prefix = source.prefix
            _follow(current, self)
        return original(self, source, **arguments)

    return get_weights_iterator


def wrap_update_from_disk(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `WeightUpdater.update_weights_from_disk` that notes on the model what it holds afterwards."""

    def update_weights_from_disk(self: Any, model_path: str, *args: Any, **kwargs: Any) -> Any:
        model = self.get_model()
        before = loaded_weights(model)
        model.__dict__[_ATTRIBUTE] = LoadedWeights(None, "updating the weights failed")
        with recording() as current:
            success, message = original(self, model_path, *args, **kwargs)
            loaded = current.finish()
        if success and before.names and loaded.identity is not None and loaded.names != before.names:
            loaded = LoadedWeights(None, "the update has other tensors than the model was loaded from")
        if success:
            _note(self.get_model(), loaded, model_path)
        return success, message

    return update_weights_from_disk


def follow_updates(content: bool) -> None:
    """Say whether what models are given from now on is to be identified by its content."""
    _models.updating = content


def _watch(model: Any) -> None:
    """Notice what the model's own `load_weights` is given at run time, whoever calls it. Doing it twice is harmless."""
    if "load_weights" in vars(model) or not hasattr(type(model), "load_weights"):
        return

    def load_weights(self: Any, weights: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if recorder() is not None:
            # From files, which are identified as such.
            return type(self).load_weights(self, weights, *args, **kwargs)
        update = _Update(loaded_weights(self))
        self.__dict__[_ATTRIBUTE] = LoadedWeights(None, "an update is under way or has failed")
        seen = update.watch(weights) if _models.updating else weights
        result = type(self).load_weights(self, seen, *args, **kwargs)
        self.__dict__[_ATTRIBUTE] = update.finish() if _models.updating else update.unidentified()
        return result

    # A method, so that a copy of the model gets one of its own. Past `Module.__setattr__`, which has no say in it.
    model.__dict__["load_weights"] = types.MethodType(load_weights, model)


class _Update:
    """Tensors given to a model, on top of those that it held before."""

    def __init__(self, before: LoadedWeights) -> None:
        self._held = {tensor.name: tensor for tensor in before.tensors}
        self._reason = "" if before.tensors else f"what it updates is not known: {before.reason}"

    def watch(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Give `weights` on, and note each."""
        for name, value in weights:
            self._take(name, value)
            yield name, value

    def _take(self, name: str, value: Any) -> None:
        held = self._held.get(name)
        if held is None:
            self._reason = self._reason or f"the update has a tensor {name[:80]!r}, which the checkpoint has not"
            return
        try:
            given: Tensor = tensor_of(name, value)
        except KvprovError as error:
            self._reason = self._reason or error.message
            return
        if given.shape != held.shape:
            self._reason = self._reason or f"the update's tensor {name[:80]!r} has another shape than the checkpoint's"
        self._held[name] = given

    def finish(self) -> LoadedWeights:
        """Return what the model holds now."""
        if self._reason:
            return LoadedWeights(None, self._reason)
        tensors = tuple(self._held.values())
        return LoadedWeights(tensors_identity(tensors_digest(tensors)), tensors=tensors)

    def unidentified(self) -> LoadedWeights:
        """Return that nobody looked at what the model was given."""
        return LoadedWeights(None, "updates are known by the version that is declared with them")


def loaded_weights(model: Any) -> LoadedWeights:
    """Return what is known of `model`'s weights."""
    loaded = vars(model).get(_ATTRIBUTE)
    return loaded if isinstance(loaded, LoadedWeights) else LoadedWeights(None, "its load format is not followed")


def forget(model: Any, reason: str) -> None:
    """Note that nobody knows any more what `model` holds."""
    model.__dict__[_ATTRIBUTE] = LoadedWeights(None, reason)


def drafts() -> list[LoadedWeights]:
    """Return what is known of each draft model's weights that this process has loaded."""
    return [loaded_weights(model) for model in _models.drafts]
