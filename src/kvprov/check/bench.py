"""Where configurations become cases and state: content is put in place, identified, and run."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvprov.check.case import Case
from kvprov.check.compare import Difference, difference
from kvprov.check.lora import MTIME_NS
from kvprov.check.prefill import Model, Run, State
from kvprov.check.space import Candidate, Representation, Space
from kvprov.contract.descriptor import ABSENT, Descriptor, Known, Value
from kvprov.contract.dimension import Half, Kind
from kvprov.contract.dimensions import (
    ADAPTER,
    CLIENT_NAMESPACE,
    KV_REPRESENTATION,
    MODEL_CONFIG,
    PRECISION,
    SHARING_DOMAIN,
    WEIGHTS,
)
from kvprov.contract.key import DigestBits
from kvprov.contract.registry import Registry
from kvprov.identity.adapter import identify_adapter
from kvprov.identity.checkpoint import identify_checkpoint, select_files
from kvprov.identity.digest_cache import DigestCache
from kvprov.identity.domain import FleetSecret, client_namespace, sharing_domain
from kvprov.identity.files import Stamp
from kvprov.identity.kv_representation import KvRepresentation, LayerGroup, kv_representation
from kvprov.identity.model_config import model_config
from kvprov.identity.precision import Precision, precision

Values = Mapping[str, Candidate]
"""A value of each dimension, by its name: one configuration."""

_COPIED_BYTES: Final = 64 << 20
"""Adapters up to this size are copied to other places, larger ones are linked to."""


def link_files(folder: Path, at: Path) -> Path:
    """Make `at` a folder that holds what `folder` holds, by links; whatever it held is replaced."""
    at.mkdir(parents=True, exist_ok=True)
    for old in at.iterdir():
        old.unlink()
    for path in sorted(folder.iterdir()):
        (at / path.name).symlink_to(path.resolve())
    return at


def copy_adapter(folder: Path, at: Path) -> Path:
    """Put an adapter into the folder `at` instead of what it holds, with times that say nothing."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if sum(path.stat().st_size for path in files) > _COPIED_BYTES:
        return link_files(folder, at)
    at.mkdir(parents=True, exist_ok=True)
    for old in at.iterdir():
        old.unlink()
    for path in files:
        shutil.copyfile(path, at / path.name)
        os.utime(at / path.name, ns=(MTIME_NS, MTIME_NS))
    return at


class Bench:
    """Makes cases and state of configurations. State is kept by what shaped it, and computed once.

    Args:
        model: The model.
        space: The space.
        secret: The fleet's secret, for salts.
        bits: How much of a digest enters keys.
        cache: Where digests of checkpoint files are remembered.
    """

    def __init__(
        self, model: Model, space: Space, secret: FleetSecret | None, bits: DigestBits, cache: DigestCache | None
    ) -> None:
        self.model = model
        self.space = space
        self._secret = secret
        self._bits = bits
        self._cache = cache
        self._states: dict[tuple[object, ...], State] = {}
        self._weights: dict[object, str] = {}
        self._configs: dict[tuple[str, ...], dict[str, object]] = {}

    # State.

    def _run(self, values: Values) -> Run:
        return Run(
            weights=values[WEIGHTS.name].folder or self.model.folder,
            config={k: v for name in sorted(values) for k, v in values[name].config.items()},
            quantization=values[PRECISION.name].quantization,
            adapter=values[ADAPTER.name].folder,
        )

    def fresh_state(self, values: Values) -> State:
        """Load the model and return the state of one configuration."""
        return self.model.run(self._run(values), self.space.tokens)

    def state(self, values: Values) -> State:
        """Return the state of one configuration. What does not shape it, does not make it another."""
        shaping = tuple(
            (name, value.name)
            for name, value in sorted(values.items())
            if self.space.registry[name].kind is Kind.COMPUTATIONAL and name != KV_REPRESENTATION.name
        )
        if shaping not in self._states:
            self._states[shaping] = self.fresh_state(values)
        return self._states[shaping]

    @staticmethod
    def representation(values: Values) -> Representation:
        """Return how a configuration's state is stored."""
        found = values[KV_REPRESENTATION.name].representation
        assert found is not None
        return found

    def difference(self, writer: Values, reader: Values) -> Difference:
        """Compare what two configurations store of the prompt."""
        return difference(
            (self.state(writer), self.representation(writer)), (self.state(reader), self.representation(reader))
        )

    # Cases.

    def case(
        self,
        values: Values,
        registry: Registry,
        *,
        model_at: Path | None = None,
        adapter_at: Path | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> Case:
        """Return what a key function is shown of one configuration.

        Args:
            values: The configuration.
            registry: The dimensions that are bound.
            model_at: Where the checkpoint is, when not in its candidate's folder.
            adapter_at: Where the adapter is, when not in its candidate's folder.
            tokens: Another prompt.

        Raises:
            KvprovError: Content has no identity.
        """
        model = model_at or values[WEIGHTS.name].folder or self.model.folder
        adapter = adapter_at or values[ADAPTER.name].folder
        salt, namespace = values[SHARING_DOMAIN.name].text, values[CLIENT_NAMESPACE.name].text
        held = self._precision(values)
        stored = self._kv(values)
        config = self._config(values[MODEL_CONFIG.name])
        known: dict[str, Value] = {
            WEIGHTS.name: Known(self._weights_identity(model)),
            PRECISION.name: precision(held),
            MODEL_CONFIG.name: model_config(config, {"architecture": self.model.architecture}),
            KV_REPRESENTATION.name: kv_representation(stored),
            ADAPTER.name: ABSENT if adapter is None else Known(identify_adapter(adapter).identity),
            SHARING_DOMAIN.name: ABSENT if salt is None else sharing_domain(salt, self._secret),
            CLIENT_NAMESPACE.name: ABSENT if namespace is None else client_namespace(namespace, self._secret),
        }
        for name, candidate in values.items():
            if name not in known:
                known[name] = ABSENT if candidate.identity is None else Known(candidate.identity)
        worker, request = ({name: known[name] for name in registry.names(half)} for half in (Half.WORKER, Half.REQUEST))
        return Case(
            tokens=tokens or self.space.tokens,
            model=model,
            adapter=adapter,
            salt=salt,
            namespace=namespace,
            config=config,
            precision=held,
            representation=stored,
            registry=registry,
            descriptor=Descriptor(worker, request),
            bits=self._bits,
        )

    def _weights_identity(self, folder: Path) -> str:
        # Links are followed: a folder in which links were exchanged holds other files.
        files = tuple((path.resolve(), Stamp.of(path)) for path in select_files(folder))
        if files not in self._weights:
            self._weights[files] = identify_checkpoint(folder, cache=self._cache).identity
        return self._weights[files]

    def _config(self, candidate: Candidate) -> dict[str, object]:
        # An override of a dimension from outside is that dimension's, and not this one's.
        key = (candidate.name,)
        if key not in self._configs:
            self._configs[key] = self.model.resolved(candidate.config)
        return self._configs[key]

    def _precision(self, values: Values) -> Precision:
        quantization = values[PRECISION.name].quantization
        return Precision(
            weight_dtype=self.model.dtype,
            compute_dtype="float32",
            quantization=None if quantization is None else f"kvprov-check-{quantization}",
            parameters={"granularity": "per output channel"},
        )

    def _kv(self, values: Values) -> KvRepresentation:
        representation = self.representation(values)
        counted = Counter((k.shape[0], k.shape[2], v.shape[2]) for k, v in self.state(self.space.base).layers)
        groups = [
            LayerGroup("attention", layers, representation.element, "auto", heads, size, size_v)
            for (heads, size, size_v), layers in counted.items()
        ]
        return KvRepresentation(groups, representation.layout, f"kvprov-check-{representation.serialization}")
