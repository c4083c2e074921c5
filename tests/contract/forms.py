"""Descriptors as the plain values that the reference implementation works on."""

from __future__ import annotations

from collections.abc import Mapping

from kvprov.contract import Descriptor, Known, Registry, Unknown, Value
from tests.contract.reference import Half, Json


def _state(value: Value) -> Json:
    if isinstance(value, Known):
        return {"state": "known", "identity": value.identity}
    return {"state": "unknown", "reason": value.reason} if isinstance(value, Unknown) else {"state": "absent"}


def as_document(registry: Registry, descriptor: Descriptor) -> Json:
    return {
        "registry": {"worker": list(registry.worker), "request": list(registry.request)},
        "descriptor": {
            "worker": {name: _state(value) for name, value in descriptor.worker.items()},
            "request": {name: _state(value) for name, value in descriptor.request.items()},
        },
    }


def _half(values: Mapping[str, Value]) -> Half:
    return {name: value.identity if isinstance(value, Known) else None for name, value in values.items()}


def as_halves(descriptor: Descriptor) -> tuple[Half, Half]:
    return _half(descriptor.worker), _half(descriptor.request)
