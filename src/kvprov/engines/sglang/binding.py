"""One worker's binding: from the facts of an SGLang scheduler process to the digest that enters its keys."""

from __future__ import annotations

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
from kvprov.contract.key import key_text
from kvprov.engines.bypass import Bypasses
from kvprov.engines.provenance import WorkerHalf, announce, extension_value, with_nonces
from kvprov.engines.sglang import facts, hooks, ledger, media
from kvprov.engines.sglang.adapters import adapter_value
from kvprov.engines.sglang.log import logger
from kvprov.engines.sglang.metrics import bypass_counter
from kvprov.engines.sglang.seams import SEAMS
from kvprov.engines.sglang.stamp import Stamp, set_stamp, stamp_of
from kvprov.engines.sglang.storage import PRIVATE
from kvprov.engines.sglang.weights import drafts, loaded_weights
from kvprov.errors import BindingError
from kvprov.extensions import Extension, load_extensions, registry_with
from kvprov.fleet import fleet_secret
from kvprov.identity.domain import client_namespace, sharing_domain
from kvprov.identity.label import label
from kvprov.ledger.writer import Recorder, SilentRecorder
from kvprov.settings import load_settings

_SESSION = "_kvprov_session"


class SchedulerBinding:
    """Binds the requests of one scheduler process. SGLang runs one for each rank.

    Args:
        scheduler: SGLang's scheduler, complete.

    Raises:
        KvprovError: A setting cannot be used, or the seams are not in effect.
    """

    def __init__(self, scheduler: Any) -> None:
        self.settings = load_settings()
        self.extensions = load_extensions()
        self.registry = registry_with(self.extensions, self.settings.unsafe_withhold)
        self.secret = fleet_secret(self.settings)
        self.bypasses = Bypasses(logger)
        self._counter = bypass_counter(scheduler.server_args)
        self.scheduler = scheduler
        # The self-check's requests are neither told of, nor counted, nor recorded: see `announce`.
        self._announced = False
        self._salt_warned = False
        self.ledger: Recorder = SilentRecorder()
        if undone := [*SEAMS.undone(), *hooks.replaced(SEAMS.all())]:
            raise BindingError(
                f"Something replaced {', '.join(undone)} after kvprov had bound it.",
                "Remove the plugin that does so, or let it wrap what it finds with functools.wraps.",
            )
        self._request_extensions = [e for e in self._registered() if e.dimension.half is Half.REQUEST]
        values = self._worker_values()
        self.worker = WorkerHalf(0, values, self._digester(values))

    def _registered(self) -> list[Extension]:
        return [extension for extension in self.extensions if extension.dimension.name in self.registry]

    def _digester(self, values: dict[str, Value]) -> Digester:
        # What is not known of a worker is known to itself: its own prefix cache still works, for this process alone.
        return Digester(self.registry, with_nonces(values))

    @property
    def model_runner(self) -> Any:
        """SGLang's model runner of this rank."""
        return self.scheduler.tp_worker.model_runner

    @property
    def model(self) -> Any:
        """The model that computes state."""
        return self.model_runner.model

    @property
    def declared(self) -> Known | None:
        """What the operator declared for weights that cannot be identified by content."""
        return label(self.settings.weights_label) if self.settings.weights_label else None

    def _worker_values(self) -> dict[str, Value]:
        arguments, config = self.scheduler.server_args, self.scheduler.model_config
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        values: dict[str, Value] = {
            WEIGHTS.name: facts.weights_value(loaded_weights(self.model), self.declared),
            PRECISION.name: facts.precision_value(arguments, config, self.model),
            MODEL_CONFIG.name: facts.model_config_value(arguments, config, self.model, self.declared),
            KV_REPRESENTATION.name: facts.kv_representation_value(arguments, config, pool, self.scheduler.tree_cache),
        }
        for extension in self._registered():
            if extension.dimension.half is Half.WORKER:
                values[extension.dimension.name] = extension_value(extension, arguments)
        return {name: value for name, value in values.items() if name in self.registry}

    def _domain(self, salt: object) -> Value:
        if not salt:
            return ABSENT
        if not isinstance(salt, str):
            return Unknown("sharing_domain: the salt is not text")
        if self.secret is None and self._announced and not self._salt_warned:
            self._salt_warned = True
            logger.warning(
                "kvprov: requests carry cache salts and there is no fleet secret. They are kept apart, but whoever "
                "lists the store can search its names for salts it guesses. Set KVPROV_SECRET_FILE."
            )
        return sharing_domain(salt, self.secret)

    def _namespace(self, namespace: object) -> Value:
        if not namespace:
            return ABSENT
        if not isinstance(namespace, str):
            return Unknown("client_namespace: it is not text")
        return client_namespace(namespace, self.secret)

    def stamp(self, request: Any, namespace: Any, salt: Any) -> None:
        """Compute and note what the keys of `request` are bound to.

        Args:
            request: One of SGLang's requests.
            namespace: The client's own namespace, without the adapter's handle that SGLang appends to it.
            salt: The tenant's salt.
        """
        values: dict[str, Value] = {
            ADAPTER.name: adapter_value(self.model_runner.lora_manager, request.lora_id),
            SHARING_DOMAIN.name: self._domain(salt),
            CLIENT_NAMESPACE.name: self._namespace(namespace),
        }
        for extension in self._request_extensions:
            values[extension.dimension.name] = extension_value(extension, request)
        values = {name: values[name] for name in self.registry.request}
        reasons = [value.reason for value in values.values() if isinstance(value, Unknown)]
        half = self.worker
        digester = self._digester(half.values) if half.changing else half.digester
        text = key_text(digester.digest(with_nonces(values)), self.settings.digest_bits)
        if half.reason:
            reasons.append(half.reason)
        mixed = _session_reason(request, text)
        if mixed:
            reasons.append(mixed)
        beside, why = media.bind(request, half.epoch)
        if why:
            reasons.append(why)
        reason = "; ".join(reasons)
        former = stamp_of(request)
        set_stamp(
            request,
            Stamp(
                text=PRIVATE + text + beside if reason else text + beside,
                epoch=half.epoch,
                reason=reason,
                barred=bool(mixed) or half.changing,
                namespace=namespace,
                salt=salt,
            ),
        )
        if not reason:
            self.ledger.note(text, digester, values, self._names(request))
        elif self._announced and (former is None or former.reason != reason):
            # A request with media is stamped twice, and counts once.
            self.bypasses.note(request.rid, reason)
            if self._counter is not None:
                self._counter.labels(reason=reason.split(":", 1)[0]).inc()

    def _names(self, request: Any) -> dict[str, str]:
        """Return what SGLang calls the values of a request, by dimension. Its salt is none of them."""
        if request.lora_id is None:
            return {}
        reference = self.model_runner.lora_manager.lora_refs.get(request.lora_id)
        return {} if reference is None else {ADAPTER.name: str(reference.lora_name)}

    def is_stale(self, request: Any) -> bool:
        """Whether the worker has changed since `request` was stamped."""
        stamp = stamp_of(request)
        return stamp is None or stamp.epoch != self.worker.epoch

    def renew(self, request: Any) -> None:
        """Stamp a request anew that holds no state yet, and forget what was to be read for its former key."""
        former = stamp_of(request)
        if former is None or not self.is_stale(request) or _holds_state(request):
            return
        self.scheduler.tree_cache.release_aborted_request(request.cache_request_handle)
        self.stamp(request, former.namespace, former.salt)

    def keeps(self, request: Any) -> bool:
        """Whether what `request` computes may be kept under its key, be it by this engine alone."""
        stamp = stamp_of(request)
        return stamp is not None and not stamp.barred and stamp.epoch == self.worker.epoch

    def _set_weights(self, value: Value, *, changing: bool) -> None:
        values = dict(self.worker.values)
        if WEIGHTS.name in values:
            values[WEIGHTS.name] = value
        if MODEL_CONFIG.name in values and drafts():
            # An update may reach a draft model as well. What a trusted updater declares covers both.
            declared = value if isinstance(value, Known) and value.identity.startswith("label:") else self.declared
            arguments, config = self.scheduler.server_args, self.scheduler.model_config
            values[MODEL_CONFIG.name] = facts.model_config_value(arguments, config, self.model, declared)
        self.worker = WorkerHalf(self.worker.epoch + 1, values, self._digester(values), changing)
        self.ledger.note_worker(self.worker.digester)

    def weights_may_change(self, reason: str) -> None:
        """From now on, and until the weights are known again, nothing is read from or kept for others."""
        if not self.worker.changing:
            logger.warning("kvprov: %s. Until the weights are known again, requests bypass the shared tier.", reason)
        self._set_weights(Unknown(f"weights: {reason}"), changing=True)

    def weights_changed(self, value: Value) -> None:
        """From now on, requests are computed with the weights that `value` names."""
        if isinstance(value, Known):
            logger.info("kvprov: weights=%s", value.identity)
        else:
            logger.warning("kvprov: weights=%s", value)
        self._set_weights(value, changing=not isinstance(value, Known))
        for request in list(self.scheduler.waiting_queue):
            if not _holds_state(request):
                self.renew(request)
                self.scheduler._prefetch_kvcache(request)

    def announce(self, path: str) -> None:
        """Log what is bound. From now on requests are told of, counted and recorded."""
        self._announced = True
        self.ledger = ledger.recorder(self.settings, self.scheduler.server_args, path)
        self.ledger.note_worker(self.worker.digester)
        announce(
            logger,
            f"path={path}",
            settings=self.settings,
            registry=self.registry,
            worker=self.worker,
            secret=self.secret,
        )


def _holds_state(request: Any) -> bool:
    """Whether something of `request` is computed already: on the device, or put aside to be taken up again."""
    kv = request.kv
    return kv.holds_kv or getattr(kv, "retraction_backup", None) is not None


def _session_reason(request: Any, text: str) -> str:
    """Return why a request of a streaming session must not keep what it computes.

    Such a session hands its KV state from turn to turn, whatever adapter, salt or weights each turn has.
    """
    session = getattr(request, "session", None)
    if session is None or not getattr(session, "streaming", False):
        return ""
    first = session.__dict__.setdefault(_SESSION, text)
    if first == text:
        return ""
    # For good: a turn that returns to the first key would continue what others computed.
    session.__dict__[_SESSION] = "mixed"
    return "session: its turns have different provenance"
