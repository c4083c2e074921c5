from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvprov.contract import ContractError, Dimension, ErrorCode, Half, Kind, Registry
from kvprov.contract.dimensions import BUILT_IN, NOT_BOUND
from tests.strategies import dimension_lists, dimensions, registries


@given(dimension_lists())
def test_each_half_is_in_byte_order(chosen: list[Dimension]) -> None:
    registry = Registry(chosen)
    for half in Half:
        expected = sorted((d.name for d in chosen if d.half is half), key=str.encode)
        assert list(registry.names(half)) == expected
    assert registry.names(Half.WORKER) == registry.worker
    assert registry.names(Half.REQUEST) == registry.request
    assert len(registry) == len(registry.worker) + len(registry.request) == len(chosen)


@given(dimension_lists(min_size=1), st.data())
def test_equal_registries_have_equal_hashes(chosen: list[Dimension], data: st.DataObject) -> None:
    one, other = Registry(chosen), Registry(data.draw(st.permutations(chosen)))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Registry(chosen[1:])


@given(registries(), dimensions(), st.sampled_from(Half))
def test_a_name_is_registered_once_across_both_halves(registry: Registry, dimension: Dimension, half: Half) -> None:
    assume(dimension.name not in registry)
    wider = registry.register(dimension)
    assert dimension.name in wider
    assert dimension.name not in registry, "register returns a new registry"
    with pytest.raises(ContractError) as caught:
        wider.register(Dimension(dimension.name, half, Kind.PERMISSION, "again"))
    assert (caught.value.code, caught.value.subject) == (ErrorCode.DOUBLED_DIMENSION, dimension.name)


@given(registries(min_size=1), st.data())
def test_withhold_undoes_register(registry: Registry, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([d.name for d in registry]))
    narrower = registry.withhold(name)
    assert name not in narrower
    assert len(narrower) == len(registry) - 1
    assert narrower.register(registry[name]) == registry


@given(registries(), dimensions())
def test_only_what_is_registered_can_be_withheld_or_looked_up(registry: Registry, dimension: Dimension) -> None:
    assume(dimension.name not in registry)
    for act in (registry.withhold, registry.__getitem__):
        with pytest.raises(ContractError) as caught:
            act(dimension.name)
        assert (caught.value.code, caught.value.subject) == (ErrorCode.UNREGISTERED_DIMENSION, dimension.name)


def test_the_built_in_dimensions_are_those_of_the_specification() -> None:
    assert BUILT_IN.worker == ("kv_representation", "model_config", "precision", "weights")
    assert BUILT_IN.request == ("adapter", "client_namespace", "sharing_domain")
    permissions = {d.name for d in BUILT_IN if d.kind is Kind.PERMISSION}
    assert permissions == {"sharing_domain", "client_namespace"}


def test_every_built_in_dimension_says_why_and_needs_no_prefix() -> None:
    for dimension in BUILT_IN:
        assert dimension.why.endswith(".")
        assert "." not in dimension.name, "dots are for names from outside the package"


def test_what_is_not_bound_says_why_and_can_be_registered() -> None:
    assert NOT_BOUND
    for name, why in NOT_BOUND.items():
        assert why.endswith(".")
        assert name in BUILT_IN.register(Dimension(name, Half.WORKER, Kind.COMPUTATIONAL, why))


@pytest.mark.parametrize("half", list(Half))
def test_a_half_given_as_text_counts(half: Half) -> None:
    # Dimensions come from outside the package too: one that lands in neither half would be bound nowhere.
    registry = Registry([Dimension("acme.x", half.value, "computational", "")])  # type: ignore[arg-type]
    assert registry.names(half) == ("acme.x",)
    assert registry["acme.x"].kind is Kind.COMPUTATIONAL


def test_a_half_or_a_kind_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="Half"):
        Dimension("a", "both", Kind.COMPUTATIONAL, "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Kind"):
        Dimension("a", Half.WORKER, "other", "")  # type: ignore[arg-type]
