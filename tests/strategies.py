"""Hypothesis strategies for the contract's terms, all in one place.

Short names and identities over few characters are drawn often, on purpose: near collisions are likelier there than
in long random text.
"""

from __future__ import annotations

import string
from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvprov.contract import ABSENT, Descriptor, Dimension, Half, Kind, Known, Registry, Unknown, Value
from kvprov.contract.descriptor import MAX_IDENTITY_BYTES

_LOWER = string.ascii_lowercase
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


def _of(*parts: SearchStrategy[str]) -> SearchStrategy[str]:
    return st.tuples(*parts).map("".join)


@cache
def names() -> SearchStrategy[str]:
    """Dimension names."""
    part = st.text(_LOWER + string.digits + "_", max_size=12)
    tail = st.lists(part.filter(bool).map(".".__add__), max_size=2).map("".join)
    near = st.sampled_from(["a", "a.a", "a.b", "a1", "a_b", "aa", "ab", "b", "worker", "request", "adapter"])
    return near | _of(st.sampled_from(_LOWER), part, tail)


@cache
def identities() -> SearchStrategy[str]:
    """Identities, up to the longest."""
    scheme = _of(st.sampled_from(_LOWER), st.text(_LOWER + string.digits + ".-", max_size=12))
    payload = st.text(_PRINTABLE, min_size=1, max_size=40)
    near = st.sampled_from([f"{s}:{x}" for s in ("s", "t", "xs") for x in ("x", "xx", ":", "x:", "0", "00", "xs:x")])
    full = scheme.map(lambda s: s + ":" + "x" * (MAX_IDENTITY_BYTES - len(s) - 1))
    return near | near | _of(scheme, st.just(":"), payload) | full


@cache
def values() -> SearchStrategy[Value]:
    """Values that have an encoding: absent and known."""
    return st.just(ABSENT) | identities().map(Known)


def unknowns() -> SearchStrategy[Unknown]:
    """Unknown values, with and without a reason."""
    return st.text(max_size=20).map(Unknown)


def dimensions() -> SearchStrategy[Dimension]:
    """Dimensions of either half."""
    return st.builds(Dimension, names(), st.sampled_from(Half), st.sampled_from(Kind), st.text(max_size=10))


def dimension_lists(min_size: int = 0) -> SearchStrategy[list[Dimension]]:
    """Dimensions with distinct names, in any order."""
    return st.lists(dimensions(), min_size=min_size, max_size=7, unique_by=lambda dimension: dimension.name)


def registries(min_size: int = 0) -> SearchStrategy[Registry]:
    """Registries, the empty one included unless `min_size` forbids it."""
    return dimension_lists(min_size).map(Registry)


@st.composite
def descriptors(draw: st.DrawFn, registry: Registry) -> Descriptor:
    """Descriptors of `registry` that have an encoding, with the names of each half in any order."""
    worker = {name: draw(values()) for name in draw(st.permutations(registry.worker))}
    request = {name: draw(values()) for name in draw(st.permutations(registry.request))}
    return Descriptor(worker, request)


@st.composite
def cases(draw: st.DrawFn, min_size: int = 0) -> tuple[Registry, Descriptor]:
    """A registry of at least `min_size` dimensions, and a descriptor of it."""
    registry = draw(registries(min_size))
    return registry, draw(descriptors(registry))
