"""Weights that change at run time: from when they are not known any more, and when they are known again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvprov.contract.descriptor import Known, Unknown, Value
from kvprov.contract.dimensions import WEIGHTS
from kvprov.engines.vllm import weights
from kvprov.engines.vllm.adapters import Unfinished
from kvprov.engines.vllm.binding import EngineBinding
from kvprov.engines.vllm.log import logger

KEEPS_WEIGHTS: Final = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
    }
)
"""Worker methods after which the weights are what they were. Any other may have changed them: a trainer's own methods
have names that nobody can list."""

RELOADS: Final = "reload_weights"
FINISHES: Final = "finish_weight_update"

STARTS: Final = frozenset({"start_weight_update", "start_draft_weight_update"})
WITHIN: Final = STARTS | {"update_weights"}
"""Worker methods after whose failure vLLM has ended the update."""

CHANGES_PARAMETERS: Final = frozenset({RELOADS, FINISHES, "sleep", "start_weight_update", "update_weights", "wake_up"})
"""Worker methods that change nothing but the parameters of the model, so that reading all of these anew makes the
worker known."""

DISCARDS_WEIGHTS: Final = 2
"""The level of sleep from which on vLLM drops the weights."""


def name_of(method: Any) -> str:
    """Return the name of a method that is called in the workers."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__qualname__)


def keeps_weights(method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call in the workers leaves the weights, and all that is known of them, as they are.

    Args:
        method: The method, by name, or a function.
        args: Its arguments.
        kwargs: Its named arguments.
    """
    if not isinstance(method, str):
        return False
    if method == "update_config":
        # How weights are loaded says nothing of those that are there. The model's configuration may.
        overrides = kwargs.get("overrides", args[0] if args else None)
        return isinstance(overrides, Mapping) and set(overrides) <= {"load_config"}
    return method in KEEPS_WEIGHTS


class WeightUpdates:
    """Follows what is done to one engine's weights. Runs in the engine's main thread.

    Args:
        binding: The engine's binding, which is told.
        unfinished: Gives the requests that the scheduler has.
    """

    def __init__(self, binding: EngineBinding, unfinished: Unfinished) -> None:
        self._binding = binding
        self._unfinished = unfinished
        # Stays for good: an updater may vouch for what such a call left behind, but reloading does not take it back.
        self._tainted = ""
        self._updating = False
        self._models = binding.models_at_hand()
        self._seen = self._direct_loads()

    def _direct_loads(self) -> int:
        return sum(map(weights.direct_loads, self._models))

    def call(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Call a method in the workers by `run`, and return what it returns."""
        if keeps_weights(method, args, kwargs):
            return run()
        shown = name_of(method)
        # A function is none of vLLM's methods, whatever it is called.
        name = method if isinstance(method, str) else ""
        if name not in CHANGES_PARAMETERS:
            self._tainted = shown
        if name in STARTS:
            self._updating = True
        self._may_change(f"{shown} was called at run time, which may change them")
        try:
            result = run()
        except BaseException:
            if name in WITHIN:
                self._updating = False
            raise
        finally:
            self._seen = self._direct_loads()
        if name == FINISHES:
            self._updating = False
        if name == RELOADS:
            self._reloaded()
        return result

    def _may_change(self, reason: str) -> None:
        self._binding.weights_may_change(reason, self._unfinished)

    def _reloaded(self) -> None:
        if self._updating:
            value: Value = Unknown("weights: they were reloaded within an update")
        elif self._tainted:
            value = Unknown(f"weights: {self._tainted} may have changed what reloading does not restore")
        else:
            value = self._binding.reloaded_weights()
        self._binding.weights_changed(value, self._unfinished)

    def sleep(self, level: int) -> None:
        """Note that the engine goes to sleep."""
        if level >= DISCARDS_WEIGHTS:
            if self._binding.has_draft:
                # The draft model's are dropped as well, and reloading reads the target's alone.
                self._tainted = f"sleep at level {level}"
            self._may_change(f"the engine slept at level {level}, which drops them")

    def declared(self, version: Any) -> None:
        """Take an updater's word for what the weights are, where the operator has said that it is trusted."""
        self.look()
        if self._updating:
            # What arrives after the declaration is not covered by it.
            logger.warning(
                "kvprov: the weights' version %.80r was declared within an update: it does not count.", version
            )
            return
        worker = self._binding.worker
        value = self._binding.declared_weights(version)
        if self._binding.settings.weights_run is None and not worker.changing:
            # The weights are known by their content, and the declaration adds nothing.
            return
        if isinstance(value, Known) and not worker.changing and worker.values.get(WEIGHTS.name) == value:
            return
        self._binding.weights_changed(value, self._unfinished)

    def look(self) -> None:
        """Notice weights that somebody in this very process gave to the model without asking the engine."""
        if self._models and self._direct_loads() != self._seen:
            self._seen = self._direct_loads()
            self._may_change("the model's load_weights was called at run time")
