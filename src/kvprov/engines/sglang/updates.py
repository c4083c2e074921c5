"""Weights that change at run time: from when they are not known any more, and when they are known again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvprov.contract.descriptor import Unknown, Value
from kvprov.contract.dimensions import WEIGHTS
from kvprov.engines.loading import LoadedWeights
from kvprov.engines.provenance import declared_weights
from kvprov.engines.sglang import current, facts, weights
from kvprov.engines.sglang.binding import SchedulerBinding
from kvprov.engines.sglang.log import logger

KEEPS_WEIGHTS: Final = frozenset({"save_remote_model", "save_sharded_model"})
"""Methods of the scheduler, called by name, after which the weights are what they were. Any other may have changed
them."""

SEEN_FORMATS: Final = frozenset({None, "flattened_bucket"})
"""Load formats of updates whose tensors reach the model by its own `load_weights`, where they are noticed. Others,
such as `direct`, write into its parameters."""

_WEIGHTS_TAG: Final = "weights"
_RESETS: Final = "reset_tensors"


class WeightUpdates:
    """Follows what is done to the weights of one scheduler. Runs in its main thread.

    A caller who declares a version with an update, of a run that the operator has named, is believed. Then nobody reads
    what was sent. Otherwise the weights are what they were before, with every tensor that was sent in its place.

    Args:
        binding: The scheduler's binding, which is told.
    """

    def __init__(self, binding: SchedulerBinding) -> None:
        self._binding = binding
        self._reads_content = binding.settings.weights_run is None
        self._in_session = False
        self._updates = 0
        self._version: object = None

    def begin(self, what: str) -> None:
        """Note that the weights are about to change."""
        weights.follow_updates(content=self._reads_content)
        self._binding.weights_may_change(what)

    def begin_session(self) -> None:
        """Note that several updates follow, until `end_session`."""
        self._in_session, self._updates, self._version = True, 0, None
        self.begin("an update of the weights has begun")

    @property
    def known(self) -> LoadedWeights:
        """What is known of the weights. The same object as long as nobody was seen to change them."""
        return weights.loaded_weights(self._binding.model)

    def unseen(self, why: str) -> None:
        """Note that an update, which is not settled yet, has put into the model what nobody saw."""
        weights.forget(self._binding.model, why)

    def updated(self, version: object) -> None:
        """Note that an update is complete, which may be one of several.

        Args:
            version: What the caller declares the weights to be from now on, or None.
        """
        self._updates += 1
        self._version = version if version is not None else self._version
        if not self._in_session:
            self._settle()

    def end_session(self) -> None:
        """Note that the updates are complete."""
        self._in_session = False
        if not self._updates:
            # Some trainers write into the engine's memory, and nobody sees what.
            self.unseen("what an update wrote into memory was not seen")
        self._settle()

    def declared(self, version: object) -> None:
        """Take an updater's word for what the weights are, where the operator has said that it is trusted."""
        if self._in_session:
            # What arrives after the declaration is not covered by it.
            logger.warning(
                "kvprov: the weights' version %.80r was declared within an update: it does not count.", version
            )
            return
        if self._reads_content and not self._binding.worker.changing:
            # The weights are known by their content, and the declaration adds nothing.
            return
        self._version = version
        self._settle()

    def lost(self, why: str) -> None:
        """Note that nobody knows any more what the weights are."""
        weights.forget(self._binding.model, why)
        self._binding.weights_changed(Unknown(f"weights: {why}"))

    def _settle(self) -> None:
        version, self._version, self._updates = self._version, None, 0
        run = self._binding.settings.weights_run
        value: Value
        if run is not None and version is not None:
            value = declared_weights(run, version)
        else:
            value = facts.weights_value(self.known, None)
        if self._binding.worker.changing or self._binding.worker.values.get(WEIGHTS.name) != value:
            self._binding.weights_changed(value)


def wrap_update(source: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes `SchedulerWeightUpdaterManager.update_weights_from_SOURCE` tell what it did.

    Args:
        source: disk, tensor, distributed or ipc.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, recv_req: Any) -> Any:
            follows = current.updates()
            if follows is None:
                return original(self, recv_req)
            follows.begin(f"the weights are being updated from {source}")
            before = follows.known
            try:
                result = original(self, recv_req)
            except BaseException:
                follows.lost(f"an update from {source} failed")
                raise
            load_format = None if source == "disk" else getattr(recv_req, "load_format", None)
            if load_format not in SEEN_FORMATS or (_succeeded(result) and follows.known is before):
                # Also where it failed: an update whose flush is refused has changed the weights.
                follows.unseen(f"what an update from {source} wrote was not seen")
            # A failure leaves on the model what is known of it: nothing, once the first tensor has come.
            follows.updated(getattr(recv_req, "weight_version", None) if _succeeded(result) else None)
            return result

        return update

    return wrap


def _succeeded(result: Any) -> bool:
    return bool(getattr(result, "success", False))


def wrap_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `begin_weight_update` from which on the weights are not known."""

    def begin_weight_update(self: Any, recv_req: Any) -> Any:
        follows, result = current.updates(), original(self, recv_req)
        if follows is not None and _succeeded(result):
            follows.begin_session()
        return result

    return begin_weight_update


def wrap_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `end_weight_update` after which the weights are known, or not."""

    def end_weight_update(self: Any, recv_req: Any) -> Any:
        follows, result = current.updates(), original(self, recv_req)
        if follows is not None and _succeeded(result):
            follows.end_session()
        return result

    return end_weight_update


def wrap_release_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `release_memory_occupation` that notices when the weights are dropped."""

    def release_memory_occupation(self: Any, recv_req: Any) -> Any:
        result = original(self, recv_req)
        follows, binding, tags = current.updates(), current.binding(), recv_req.tags
        if follows is not None and binding is not None and (not tags or _WEIGHTS_TAG in tags):
            arguments = binding.scheduler.server_args
            if arguments.enable_memory_saver and not arguments.enable_weights_cpu_backup:
                follows.lost("their memory was released, which drops them")
        return result

    return release_memory_occupation


def wrap_check_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `check_weights` that notices when it overwrites the weights, as trainers' tests do before an update."""

    def check_weights(self: Any, recv_req: Any) -> Any:
        follows = current.updates()
        if follows is None or recv_req.action != _RESETS:
            return original(self, recv_req)
        follows.begin("the weights are being overwritten for a check")
        result = original(self, recv_req)
        follows.lost("they were overwritten for a check")
        return result

    return check_weights


def wrap_weight_version(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler.handle_update_weight_version` that takes the version for the weights' identity, if trusted."""

    def handle_update_weight_version(self: Any, recv_req: Any) -> Any:
        result = original(self, recv_req)
        if (follows := current.updates()) is not None:
            follows.declared(recv_req.new_version)
        return result

    return handle_update_weight_version


def wrap_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Scheduler.handle_rpc_request` that notices calls which may exchange the weights."""

    def handle_rpc_request(self: Any, recv_req: Any) -> Any:
        follows = current.updates()
        if follows is None or recv_req.method in KEEPS_WEIGHTS:
            return original(self, recv_req)
        follows.begin(f"{recv_req.method!r:.80} was called at run time, which may change the weights")
        result = original(self, recv_req)
        follows.lost(f"{recv_req.method!r:.80} was called at run time, which may have changed them")
        return result

    return handle_rpc_request
