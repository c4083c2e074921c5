from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvprov.contract import (
    ABSENT,
    ContractError,
    Descriptor,
    Dimension,
    ErrorCode,
    Half,
    Kind,
    Known,
    Registry,
    Unknown,
    Value,
    encode,
)
from tests.contract import reference
from tests.contract.forms import as_document, as_halves
from tests.strategies import cases, descriptors, dimension_lists, unknowns


def dimension(name: str, half: Half) -> Dimension:
    return Dimension(name, half, Kind.COMPUTATIONAL, "")


@given(cases())
def test_decoding_gives_back_what_was_encoded(case: tuple[Registry, Descriptor]) -> None:
    assert reference.decode(encode(*case)) == as_halves(case[1])


@given(cases())
def test_the_reference_implementation_encodes_alike(case: tuple[Registry, Descriptor]) -> None:
    assert encode(*case) == reference.encode(as_document(*case))


@given(cases(), cases())
def test_two_inputs_never_share_an_encoding(
    one: tuple[Registry, Descriptor], other: tuple[Registry, Descriptor]
) -> None:
    assume(as_halves(one[1]) != as_halves(other[1]))
    assert encode(*one) != encode(*other)


def every_small_descriptor() -> Iterator[tuple[Registry, Descriptor]]:
    """Every registry over three names, and every descriptor of it over three values that nearly collide."""
    names = ("a", "a.a", "as")
    states: list[Value] = [ABSENT, Known("s:x"), Known("s:xx"), Known("as:x")]
    places = [None, *itertools.product(Half, states)]
    for choice in itertools.product(places, repeat=len(names)):
        chosen = [(name, *place) for name, place in zip(names, choice, strict=True) if place is not None]
        registry = Registry(dimension(name, half) for name, half, _ in chosen)
        values = {half: {name: value for name, where, value in chosen if where is half} for half in Half}
        yield registry, Descriptor(values[Half.WORKER], values[Half.REQUEST])


def test_every_small_descriptor_has_an_encoding_of_its_own() -> None:
    encodings = [encode(*case) for case in every_small_descriptor()]
    assert len(encodings) == 9**3
    assert len(set(encodings)) == len(encodings)


@given(cases(), st.data())
def test_no_encoding_is_the_beginning_of_another(case: tuple[Registry, Descriptor], data: st.DataObject) -> None:
    enc = encode(*case)
    cut = data.draw(st.integers(0, len(enc) - 1))
    with pytest.raises(ValueError, match="truncated"):
        reference.decode(enc[:cut])
    with pytest.raises(ValueError, match="trailing"):
        reference.decode(enc + b"\x00")


@given(st.data())
def test_the_order_of_registration_and_of_values_does_not_matter(data: st.DataObject) -> None:
    dimensions = data.draw(dimension_lists())
    registry, again = Registry(dimensions), Registry(data.draw(st.permutations(dimensions)))
    descriptor = data.draw(descriptors(registry))
    shuffled = Descriptor(
        dict(data.draw(st.permutations(list(descriptor.worker.items())))),
        dict(data.draw(st.permutations(list(descriptor.request.items())))),
    )
    assert registry == again
    assert encode(again, shuffled) == encode(registry, descriptor)


def replaced(descriptor: Descriptor, name: str, value: Value) -> Descriptor:
    worker, request = dict(descriptor.worker), dict(descriptor.request)
    (worker if name in worker else request)[name] = value
    return Descriptor(worker, request)


@given(cases(min_size=1), unknowns(), st.data())
def test_an_unknown_value_never_encodes(
    case: tuple[Registry, Descriptor], unknown: Unknown, data: st.DataObject
) -> None:
    registry, descriptor = case
    name = data.draw(st.sampled_from([d.name for d in registry]))
    encode(registry, descriptor)
    with pytest.raises(ContractError) as caught:
        encode(registry, replaced(descriptor, name, unknown))
    assert (caught.value.code, caught.value.subject) == (ErrorCode.UNKNOWN_VALUE, name)
    assert unknown.reason in str(caught.value)


@pytest.mark.parametrize("value", [None, "label:x", b"\x00", 0, False])
def test_what_is_no_value_is_unknown(value: object) -> None:
    registry = Registry([dimension("a", Half.REQUEST)])
    encode(registry, Descriptor({}, {"a": ABSENT}))
    with pytest.raises(ContractError) as caught:
        encode(registry, Descriptor({}, {"a": value}))  # type: ignore[dict-item]
    assert caught.value.code is ErrorCode.UNKNOWN_VALUE


@given(cases(min_size=1), st.data())
def test_a_missing_dimension_is_an_error(case: tuple[Registry, Descriptor], data: st.DataObject) -> None:
    registry, descriptor = case
    name = data.draw(st.sampled_from([d.name for d in registry]))
    without = Descriptor(
        {n: v for n, v in descriptor.worker.items() if n != name},
        {n: v for n, v in descriptor.request.items() if n != name},
    )
    with pytest.raises(ContractError) as caught:
        encode(registry, without)
    assert (caught.value.code, caught.value.subject) == (ErrorCode.MISSING_DIMENSION, name)


@given(cases(min_size=1), st.data())
def test_an_unregistered_dimension_is_an_error(case: tuple[Registry, Descriptor], data: st.DataObject) -> None:
    registry, descriptor = case
    name = data.draw(st.sampled_from([d.name for d in registry]))
    with pytest.raises(ContractError) as caught:
        encode(registry.withhold(name), descriptor)
    assert (caught.value.code, caught.value.subject) == (ErrorCode.UNREGISTERED_DIMENSION, name)


@given(cases(), st.sampled_from(Half))
def test_one_more_dimension_starts_a_new_epoch(case: tuple[Registry, Descriptor], half: Half) -> None:
    registry, descriptor = case
    wider = registry.register(dimension("zz.extra", half))
    values = {Half.WORKER: dict(descriptor.worker), Half.REQUEST: dict(descriptor.request)}
    values[half]["zz.extra"] = ABSENT
    assert encode(wider, Descriptor(values[Half.WORKER], values[Half.REQUEST])) != encode(registry, descriptor)
