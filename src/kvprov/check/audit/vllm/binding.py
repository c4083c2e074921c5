"""kvprov's own binding for a scenario's worker, with what its workers would have reported of the scenario's files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvprov.check.audit.scenario import Scenario
from kvprov.check.audit.subject import AuditError
from kvprov.check.audit.vllm.world import World
from kvprov.contract.descriptor import ABSENT, Known, Value
from kvprov.identity.files import open_file
from kvprov.identity.tensors import hash_file, tensors_digest, tensors_identity


class _Executor:
    """Answers as the one worker of an engine that has loaded a checkpoint."""

    def __init__(self, weights: str) -> None:
        self._weights = weights

    def collective_rpc(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        from kvprov.engines.vllm import worker

        if function is not worker.report:
            raise AuditError(
                f"Binding asks the workers for {getattr(function, '__name__', function)}, which the audit has not.",
                "Report this: the audit has to follow kvprov's own binding.",
            )
        report = worker.WorkerReport(
            pid=0, bound=True, undone=[], weights=self._weights, reason="", packing="audit", draft=None
        )
        return [report]


def _weights(folder: Path) -> str:
    """Return the identity of a checkpoint's tensors, without the wait that keeps a file from changing unnoticed."""
    with open_file(folder / "model.safetensors") as file:
        return tensors_identity(tensors_digest(hash_file(file)))


class Binder:
    """Binds the requests of scenarios, as an engine of each scenario's worker would.

    Args:
        world: Makes vLLM's objects.
        name: A connector of those whose requests are bound. Binding decides by its kind what a client may say.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._bindings: dict[Scenario, Any] = {}

    def _binding(self, scenario: Scenario) -> Any:
        from vllm.config import KVTransferConfig

        from kvprov.engines.vllm.binding import EngineBinding

        worker = scenario.worker()
        if worker not in self._bindings:
            made, cache = self._world.configs(scenario)
            config = copy.copy(made)
            config.kv_transfer_config = KVTransferConfig(kv_connector=self._name, kv_role="kv_both")
            weights = _weights(self._world.materials.model(scenario))
            self._bindings[worker] = EngineBinding(config, cache, _Executor(weights))
        return self._bindings[worker]

    def start(self, scenario: Scenario) -> None:
        """Let the connector that is made next belong to an engine of the scenario's worker."""
        from kvprov.engines.vllm import seams

        seams.set_starting_engine(self._binding(scenario))

    def stamp(self, scenario: Scenario, request: Any) -> None:
        """Note on a request what its keys are bound to."""
        from kvprov.engines.vllm.stamp import stamp_of
        from kvprov.identity.adapter import identify_adapter

        adapter: Value = ABSENT
        if scenario.adapter is not None:
            adapter = Known(identify_adapter(self._world.materials.adapter(scenario.adapter)).identity)
        self._binding(scenario).stamp(request, adapter)
        stamp = stamp_of(request)
        if stamp is None or stamp.reason:
            raise AuditError(
                f"The provenance of a scenario is not known: {stamp.reason if stamp else 'there is no stamp'}.",
                "Report this: the audit's scenarios are meant to be known.",
            )
