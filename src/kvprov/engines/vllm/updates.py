"""Weights that change at run time: from when they are not known any more, and when they are known again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvprov.contract.descriptor import Known, Unknown, Value
from kvprov.engines.vllm import weights
from kvprov.engines.vllm.adapters import Unfinished
from kvprov.engines.vllm.binding import EngineBinding

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
STARTS: Final = "start_weight_update"
FINISHES: Final = "finish_weight_update"

CHANGES_PARAMETERS: Final = frozenset(
    {RELOADS, STARTS, FINISHES, "sleep", "update_config", "update_weights", "wake_up"}
)
"""Worker methods that change nothing but the parameters, so that reading all of these anew makes the worker known."""

DISCARDS_WEIGHTS: Final = 2
"""The level of sleep from which on vLLM drops the weights."""


def name_of(method: Any) -> str:
    """Return the name of a method that is called in the workers."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__qualname__)


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
        self._direct_loads = weights.direct_loads()

    def call(self, method: Any, run: Callable[[], Any]) -> Any:
        """Call a method in the workers by `run`, and return what it returns."""
        if isinstance(method, str) and method in KEEPS_WEIGHTS:
            return run()
        name = name_of(method)
        if not isinstance(method, str) or method not in CHANGES_PARAMETERS:
            self._tainted = name
        if method in (STARTS, "start_draft_weight_update"):
            self._updating = True
        self._may_change(f"{name} was called at run time, which may change them")
        result = run()
        if method == FINISHES:
            self._updating = False
        if method == RELOADS:
            self._reloaded()
        self._direct_loads = weights.direct_loads()
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
            self._may_change(f"the engine slept at level {level}, which drops them")

    def declared(self, version: str) -> None:
        """Take an updater's word for what the weights are, where the operator has said that it is trusted."""
        self.look()
        if self._updating:
            # What arrives after the declaration is not covered by it.
            return
        value = self._binding.declared_weights(version)
        if not isinstance(value, Known) and not self._binding.worker.changing:
            # The weights are known by their content, and the declaration adds nothing.
            return
        self._binding.weights_changed(value, self._unfinished)

    def look(self) -> None:
        """Notice weights that somebody in this very process gave to the model without asking the engine."""
        if weights.direct_loads() != self._direct_loads:
            self._direct_loads = weights.direct_loads()
            self._may_change("the model's load_weights was called at run time")
