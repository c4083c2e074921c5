"""Connectors that are made up at test time: what their keys hold of each dimension is drawn, and known to the test."""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kvprov.check.audit import NotApplicableError, Scenario
from kvprov.check.audit.scenario import BASE, DIMENSIONS


class Mode(enum.Enum):
    """What keys hold of one dimension, and how a report says so."""

    BOUND = "bound"
    OMITTED = "omitted"
    BY_NAME = "by name only"
    BY_PATH = "by path only"
    TRUNCATED = "truncated to {} bits"
    NOT_APPLICABLE = "not applicable"


CONTENT: Mapping[str, Callable[[Scenario], object]] = {
    "weights": lambda s: s.weights,
    "precision": lambda s: (s.quantization, s.compute_dtype),
    "model_config": lambda s: (s.rope_theta, s.sliding_window),
    "kv_representation": lambda s: (s.kv_element, s.kv_layout),
    "adapter": lambda s: s.adapter and s.adapter.content,
    "sharing_domain": lambda s: s.salt,
    "client_namespace": lambda s: s.namespace,
}
NAMES: Mapping[str, Callable[[Scenario], object]] = {
    "weights": lambda s: s.model_name,
    "adapter": lambda s: s.adapter and s.adapter.name,
}
PATHS: Mapping[str, Callable[[Scenario], object]] = {
    "weights": lambda s: (s.model_folder, s.model_name),
    "adapter": lambda s: s.adapter and s.adapter.folder,
}
SET: Mapping[str, Callable[[Scenario], bool]] = {
    "adapter": lambda s: s.adapter is not None,
    "sharing_domain": lambda s: bool(s.salt),
    "client_namespace": lambda s: bool(s.namespace),
}
"""Dimensions that a path may have no place for, and whether a scenario has a value of them."""
FEW_VALUES = frozenset({"precision", "kv_representation"})
"""Two values of each fact do not show how much of it enters."""


def digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


@dataclass(frozen=True)
class Generated:
    """One made-up connector.

    Attributes:
        modes: What its keys hold, by dimension.
        bits: How many bits of a truncated dimension: of its hash, before that is hashed again or not.
        hashed: Whether the key is one hash over everything, so that nothing of it can be read off.
        noise: What its hashes begin with.
    """

    modes: Mapping[str, Mode]
    bits: Mapping[str, int] = field(default_factory=dict)
    hashed: bool = False
    noise: bytes = b""

    def _part(self, dimension: str, scenario: Scenario) -> str:
        mode = self.modes[dimension]
        if mode is Mode.NOT_APPLICABLE:
            if SET[dimension](scenario):
                raise NotApplicableError(dimension)
            return ""
        if mode is Mode.OMITTED:
            return ""
        read = {Mode.BY_NAME: NAMES, Mode.BY_PATH: PATHS}.get(mode, CONTENT)[dimension]
        whole = digest((self.noise, read(scenario))).hex()
        return whole[: self.bits[dimension] // 4] if mode is Mode.TRUNCATED else whole

    def keys(self, scenario: Scenario) -> list[bytes]:
        parts = [f"{digest(scenario.prompt).hex()}", *(self._part(name, scenario) for name in DIMENSIONS)]
        key = "@".join(parts).encode()
        keys = [key + b"@0", key + b"@1"]
        return [hashlib.sha256(one).digest() for one in keys] if self.hashed else keys

    def expected(self) -> dict[str, str]:
        return {name: mode.value.format(self.bits.get(name)) for name, mode in self.modes.items()}


def modes_of(dimension: str, hashed: bool) -> list[Mode]:
    modes = [Mode.BOUND, Mode.OMITTED]
    if dimension in NAMES:
        modes += [Mode.BY_NAME, Mode.BY_PATH]
    if dimension in SET:
        modes.append(Mode.NOT_APPLICABLE)
    if dimension not in FEW_VALUES and not hashed:
        modes.append(Mode.TRUNCATED)
    return modes


@st.composite
def connectors(draw: st.DrawFn, hashed: bool | None = None) -> Generated:
    """Return made-up connectors, of which no two runs of the tests have the same."""
    is_hashed = draw(st.booleans()) if hashed is None else hashed
    modes = {name: draw(st.sampled_from(modes_of(name, is_hashed))) for name in DIMENSIONS}
    bits = {name: 4 * draw(st.integers(4, 31)) for name, mode in modes.items() if mode is Mode.TRUNCATED}
    return Generated(modes, bits, is_hashed)


def random_connector(source: random.Random) -> Generated:
    """Return a made-up connector that leaves something out."""
    while True:
        modes = {name: source.choice(modes_of(name, False)) for name in DIMENSIONS}
        if Mode.OMITTED in modes.values():
            bits = {name: 4 * source.randint(4, 31) for name, mode in modes.items() if mode is Mode.TRUNCATED}
            return Generated(modes, bits)


def bound_everywhere(**others: Mode) -> dict[str, Mode]:
    """Return the modes of a connector that binds everything but what is said."""
    return {name: others.get(name, Mode.BOUND) for name in DIMENSIONS}


assert set(CONTENT) == set(DIMENSIONS)
assert all(is_set(BASE) for is_set in SET.values())
