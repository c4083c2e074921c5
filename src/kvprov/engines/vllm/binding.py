"""One engine's binding: from the facts of its workers and requests to the digest that enters its keys."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kvprov.contract.descriptor import ABSENT, Known, Unknown, Value
from kvprov.contract.digest import Digester
from kvprov.contract.dimension import Half
from kvprov.contract.dimensions import (
    ADAPTER,
    CLIENT_NAMESPACE,
    KV_REPRESENTATION,
    MODEL_CONFIG,
    PRECISION,
    SHARING_DOMAIN,
    WEIGHTS,
)
from kvprov.contract.registry import Registry
from kvprov.engines.bypass import Bypasses
from kvprov.engines.lmcache.keys import client_parameters
from kvprov.engines.provenance import WorkerHalf, announce, declared_weights, extension_value, with_nonces
from kvprov.engines.vllm import connectors, facts, inputs, ledger, quirks, worker
from kvprov.engines.vllm.adapters import EngineAdapters, Unfinished
from kvprov.engines.vllm.log import logger
from kvprov.engines.vllm.peers import Strangers
from kvprov.engines.vllm.seams import SEAMS
from kvprov.engines.vllm.stamp import Stamp, make_stamp, set_stamp, stamp_of
from kvprov.errors import BindingError
from kvprov.extensions import Extension, load_extensions, registry_with
from kvprov.fleet import fleet_secret
from kvprov.identity.domain import FleetSecret, sharing_domain, tag_namespace
from kvprov.identity.label import label
from kvprov.settings import Settings, load_settings


class EngineBinding:
    """Binds the requests of one engine.

    Args:
        vllm_config: The engine's configuration, resolved.
        kv_cache_config: The scheduler's KV cache configuration.
        executor: The engine's executor, to ask its workers.

    Raises:
        KvprovError: A setting cannot be used, or a worker is not bound.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, executor: Any) -> None:
        self.settings: Settings = load_settings()
        self.extensions: tuple[Extension, ...] = load_extensions()
        self.registry: Registry = registry_with(self.extensions, self.settings.unsafe_withhold)
        self.secret: FleetSecret | None = fleet_secret(self.settings)
        self.bypasses = Bypasses(logger)
        self.strangers = Strangers()
        self._salt_warned = False
        self._executor = executor
        self._vllm_config = vllm_config
        self.engine: Any = None
        self._reports = self.call_workers(worker.report)
        for report in self._reports:
            if not report.bound:
                raise BindingError(
                    f"kvprov is not in effect in the worker process {report.pid}.",
                    "Let VLLM_PLUGINS be unset or name kvprov, and install kvprov where the workers run.",
                )
            if report.undone or (undone := SEAMS.undone()):
                raise BindingError(
                    f"Something replaced {', '.join(report.undone or undone)} after kvprov had bound it.",
                    "Remove the plugin that does so, or let it wrap what it finds with functools.wraps.",
                )
        self.adapters = EngineAdapters(executor) if vllm_config.lora_config is not None else None
        self._mixes_adapters = quirks.mixes_adapters(vllm_config)
        self._adapters_in_use = False
        self._request_extensions = [e for e in self._registered() if e.dimension.half is Half.REQUEST]
        self._keyed_by_chain = connectors.keyed_by_chain(vllm_config.kv_transfer_config)
        self._reads_client_tags = connectors.reads_client_tags(vllm_config.kv_transfer_config)
        values = self._worker_values(vllm_config, kv_cache_config)
        self.worker = WorkerHalf(0, values, self._digester(values))
        self.ledger = ledger.recorder(self.settings, vllm_config)

    def _digester(self, values: dict[str, Value]) -> Digester:
        # What is not known of a worker is known to itself: its own prefix cache still works, for this process alone.
        return Digester(self.registry, with_nonces(values))

    def call_workers(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        """Call `function(worker, *args)` in each worker process and return what each answers."""
        return list(self._executor.collective_rpc(function, args=args))

    def connector(self) -> Any:
        """Return the scheduler half of the engine's connector, or None."""
        return self.engine.scheduler.get_kv_connector()

    def token_block_size(self) -> int:
        """Return how many tokens a block of the KV cache holds."""
        return int(self._vllm_config.cache_config.block_size)

    @property
    def has_request_extensions(self) -> bool:
        """Whether an outside dimension of the request half is registered."""
        return bool(self._request_extensions)

    def _registered(self) -> list[Extension]:
        return [extension for extension in self.extensions if extension.dimension.name in self.registry]

    def _worker_values(self, vllm_config: Any, kv_cache_config: Any) -> dict[str, Value]:
        declared = label(self.settings.weights_label) if self.settings.weights_label else None
        values: dict[str, Value] = {
            WEIGHTS.name: facts.weights_value(self._reports, declared),
            PRECISION.name: facts.precision_value(vllm_config),
            MODEL_CONFIG.name: facts.model_config_value(vllm_config, self._reports, declared),
            KV_REPRESENTATION.name: facts.kv_representation_value(vllm_config, kv_cache_config, self._reports),
        }
        for extension in self._registered():
            if extension.dimension.half is Half.WORKER:
                values[extension.dimension.name] = extension_value(extension, vllm_config)
        return {name: value for name, value in values.items() if name in self.registry}

    def _domain(self, request: Any) -> Value:
        if request.cache_salt is not None and not isinstance(request.cache_salt, str):
            return Unknown("sharing_domain: the salt is not text")
        # vLLM's own prefix cache takes an empty salt for none; its HTTP server refuses one.
        if not request.cache_salt:
            return ABSENT
        return sharing_domain(request.cache_salt, self.secret)

    def _namespace(self, request: Any) -> Value:
        if not self._reads_client_tags:
            return ABSENT
        said = client_parameters(getattr(request.sampling_params, "extra_args", None))
        if said.problem:
            return Unknown(f"client_namespace: {said.problem}")
        return tag_namespace(said.tags, self.secret) if said.tags else ABSENT

    def stamp(self, request: Any, adapter: Value) -> Stamp:
        """Compute and note what the keys of `request` are bound to.

        Args:
            request: One of vLLM's requests.
            adapter: The value of its adapter dimension.
        """
        values: dict[str, Value] = {
            ADAPTER.name: adapter,
            SHARING_DOMAIN.name: self._domain(request),
            CLIENT_NAMESPACE.name: self._namespace(request),
        }
        for extension in self._request_extensions:
            values[extension.dimension.name] = extension_value(extension, request)
        values = {name: values[name] for name in self.registry.request}
        reasons = [value.reason for value in values.values() if isinstance(value, Unknown)]
        if reasons:
            values = with_nonces(values)
        half = self.worker
        digester = half.digester
        if half.reason:
            reasons.append(half.reason)
            if half.changing or self._keyed_by_chain:
                # Such a connector cannot be told to keep away from the tier: nobody else will ever ask for this key.
                digester = self._digester(half.values)
        if reason := self._bind_inputs(request, digester):
            reasons.append(reason)
        stamp = make_stamp(
            digester,
            values,
            self.settings.digest_bits,
            epoch=half.epoch,
            reason="; ".join(reasons),
            adapter=adapter.identity if isinstance(adapter, Known) else None,
        )
        set_stamp(request, stamp)
        self.ledger.note(stamp.text, digester, values, ledger.names_of(request))
        return stamp

    def _bind_inputs(self, request: Any, digester: Digester) -> str:
        lora = self._vllm_config.lora_config
        towers = lora is not None and bool(getattr(lora, "enable_tower_connector_lora", False))
        return inputs.bind(request, digester.worker_digest, adapter_shapes_media=towers)

    def hasher(self, native: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        """Return vLLM's block hasher, which hashes a request once its stamp is known.

        vLLM creates requests in a thread of its own, where workers cannot be asked. A request whose adapter has not
        been settled yet is hashed in `admit`, in the engine's main thread.
        """

        def bound_hasher(request: Any) -> list[Any]:
            if stamp_of(request) is None:
                # Here even if the stamp has to wait: media are hashed, and this thread has the time.
                self._bind_inputs(request, self.worker.digester)
                adapter = self._expected_adapter(request)
                if adapter is None:
                    return []
                self.stamp(request, adapter)
            return native(request)

        return bound_hasher

    def _no_adapter(self) -> Value:
        """Return the value for requests that name no adapter."""
        if self._mixes_adapters and self._adapters_in_use:
            return Unknown("adapter: on CPU, vLLM computes requests without one with that of another in the batch")
        return ABSENT

    def _expected_adapter(self, request: Any) -> Value | None:
        if request.lora_request is None:
            return self._no_adapter()
        if self.adapters is None:
            return Unknown("adapter: this engine has no adapters")
        identity = self.adapters.expected(request.lora_request)
        return None if identity is None else Known(identity)

    def admit(self, request: Any, unfinished: Unfinished) -> None:
        """Settle the adapter of `request` before the scheduler sees it, and hash it if that is still to do.

        Runs in the engine's main thread.

        Args:
            request: One of vLLM's requests.
            unfinished: Gives the requests that the scheduler has.
        """
        self._warn_of_salts(request)
        adapter, changed = self._expected_adapter(request), set[int]()
        if request.lora_request is not None and self.adapters is not None:
            if self._mixes_adapters and not self._adapters_in_use:
                self._adapters_in_use = True
                self._overtake([other for other in unfinished() if other.lora_request is None], "adapter: now mixed")
            adapter, changed = self.adapters.settle(request.lora_request, unfinished)
        if not self._stands(stamp_of(request), adapter):
            self.rebind(request, adapter or ABSENT)
        self.changed(changed, unfinished)
        connector = self.connector()
        if connector is not None and (reason := connector.reason_to_bypass(request)):
            self.bypasses.note(request.request_id, reason)

    def _stands(self, stamp: Stamp | None, adapter: Value | None) -> bool:
        """Whether a stamp that was made earlier, in another thread, says what is so now."""
        if stamp is None or stamp.epoch != self.worker.epoch:
            return False
        return adapter == ABSENT if stamp.adapter is None else adapter == Known(stamp.adapter)

    def _warn_of_salts(self, request: Any) -> None:
        if request.cache_salt and self.secret is None and not self._salt_warned:
            self._salt_warned = True
            logger.warning(
                "kvprov: requests carry cache salts and there is no fleet secret. They are kept apart, but whoever "
                "lists the store can search its names for salts it guesses. Set KVPROV_SECRET_FILE."
            )

    def rebind(self, request: Any, adapter: Value) -> None:
        """Stamp `request` anew and hash it from the start."""
        self.stamp(request, adapter)
        # A new list: stores under way hold the former one, in another thread, and go by it.
        request.block_hashes = []
        request.update_block_hashes()

    def _overtake(self, requests: list[Any], reason: str) -> None:
        """Rebind requests under way, beneath which something was exchanged that shapes state.

        One that has computed nothing yet will be computed with what is there now. One that has holds state of both,
        which belongs to nobody.
        """
        connector = self.connector()
        for request in requests:
            adapter = self._no_adapter()
            if request.num_computed_tokens > 0:
                adapter = Unknown(reason)
            elif request.lora_request is not None and self.adapters is not None:
                adapter = self.adapters.value(request.lora_request.lora_int_id)
            self.rebind(request, adapter)
            if connector is not None:
                connector.kvprov_rebound(request)

    def changed(self, adapter_ids: set[int], unfinished: Unfinished) -> None:
        """Rebind requests under way whose adapter was exchanged beneath them."""
        if not adapter_ids:
            return
        touched = [r for r in unfinished() if r.lora_request is not None and r.lora_request.lora_int_id in adapter_ids]
        self._overtake(touched, "adapter: it was exchanged while the request was running")

    def resync_adapters(self, unfinished: Unfinished) -> None:
        """Read from the workers which adapters they hold, after somebody told them to load or remove one."""
        if self.adapters is not None:
            self.changed(self.adapters.resync(), unfinished)

    # Weights that change at run time.

    def _set_weights(self, weights: Value, unfinished: Unfinished, *, changing: bool = False) -> None:
        values = dict(self.worker.values)
        if WEIGHTS.name in values:
            values[WEIGHTS.name] = weights
        self.worker = WorkerHalf(self.worker.epoch + 1, values, self._digester(values), changing)
        self.ledger.note_worker(self.worker.digester)
        self._overtake(unfinished(), "weights: they were changed while the request was running")

    def weights_may_change(self, reason: str, unfinished: Unfinished) -> None:
        """From now on, and until the weights are known again, every request bypasses the shared tier."""
        if not self.worker.changing:
            logger.warning("kvprov: %s. Until the weights are known again, requests bypass the shared tier.", reason)
        self._set_weights(Unknown(f"weights: {reason}"), unfinished, changing=True)

    def weights_changed(self, weights: Value, unfinished: Unfinished) -> None:
        """From now on, requests are computed with `weights`."""
        shown = weights.identity if isinstance(weights, Known) else weights
        logger.log(logging.INFO if isinstance(weights, Known) else logging.WARNING, "kvprov: weights=%s", shown)
        self._set_weights(weights, unfinished, changing=not isinstance(weights, Known))

    def models_at_hand(self) -> list[Any]:
        """Return the models of a worker that runs in this very process, where others may reach them, too."""
        if [report.pid for report in self._reports] != [os.getpid()]:
            return []
        return [model for models in self.call_workers(worker.models) for model in models]

    @property
    def has_draft(self) -> bool:
        """Whether entries hold state of a draft model."""
        return any(report.draft is not None for report in self._reports)

    def reloaded_weights(self) -> Value:
        """Ask the workers what they have just reloaded."""
        return facts.weights_value(self.call_workers(worker.report), None)

    def declared_weights(self, version: str) -> Value:
        """Return what an updater's version says of the weights, where the operator has named its run."""
        return declared_weights(self.settings.weights_run, version)

    def announce(self, connector: str) -> None:
        """Log what is bound, and record the worker."""
        self.ledger.note_worker(self.worker.digester)
        announce(
            logger,
            f"connector={connector}",
            settings=self.settings,
            registry=self.registry,
            worker=self.worker,
            secret=self.secret,
        )
