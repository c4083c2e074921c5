"""What separates two digests, in words."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract import ABSENT, Descriptor, Half, Known, Registry
from kvprov.contract.dimension import Dimension, Kind
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.document import evaluate
from kvprov.identity.canonical import canonical_json, config_identity
from kvprov.identity.domain import FleetSecret
from kvprov.identity.preimages import preimage_of
from kvprov.ledger import Record, compare
from kvprov.ledger.explain import describe
from kvprov.ledger.fields import differences, flat
from kvprov.ledger.record import MAX_CONFIG_DEPTH, verify_config
from tests import strategies
from tests.ledger.support import SECRET, request, worker

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=4)


def kept(identity: str) -> Any:
    found = preimage_of(identity)
    return None if found is None else json.loads(found)


def nothing(_identity: str) -> None:
    return None


def record(
    worker_half: Any = None,
    request_half: Any = None,
    *,
    names: dict[str, str] | None = None,
    registry: Registry = BUILT_IN,
    only_worker: bool = False,
) -> Record:
    descriptor = Descriptor(worker_half or worker(), {} if only_worker else request_half or request())
    if only_worker:
        registry = Registry([d for d in registry if d.half is Half.WORKER])
    return Record(registry, descriptor, evaluate(registry, descriptor), only_worker, {}, names or {})


def words(first: Record, second: Record, preimages: Any = kept) -> dict[str, str]:
    return {s.dimension: s.words for s in compare(first, second, preimages).separations}


def test_equal_digests_are_one() -> None:
    comparison = compare(record(), record(), kept)
    assert comparison.same
    assert comparison.words == "Both are one digest: entries of equal tokens are shared."


def test_rope_theta_is_named() -> None:
    comparison = compare(record(worker(10000.0)), record(worker(500000.0)), kept)
    assert comparison.words == "Neither finds the other's entries: model_config separates them."
    (separation,) = comparison.separations
    assert separation.kind == "computational"
    assert separation.words == ("config.rope_parameters.rope_theta is 10000 in the first and 500000 in the second")
    (field,) = separation.fields
    assert (field.path, field.first, field.second) == ("config.rope_parameters.rope_theta", "10000", "500000")


def test_a_configuration_that_is_not_recorded_is_not_guessed() -> None:
    found = words(record(worker(10000.0)), record(worker(500000.0)), nothing)
    assert found == {"model_config": "two different configurations, of which the ledger does not hold both"}


def test_adapters_are_named_as_their_workers_call_them() -> None:
    first = record(None, request("a"), names={"adapter": "standard"})
    second = record(None, request("b"), names={"adapter": "inverted\x1b[2J"})
    assert words(first, second) == {
        "adapter": "two adapters of different content: the first has the adapter that its worker calls 'standard', "
        "the second the adapter that its worker calls 'inverted\\x1b[2J'"
    }
    assert words(first, record()) == {
        "adapter": "the first has the adapter that its worker calls 'standard', the second no adapter"
    }


def test_domains_are_told_apart_by_identity_alone() -> None:
    assert words(record(None, request(salt="x")), record(None, request(salt="y"))) == {
        "sharing_domain": "two different salts, hashed with the fleet secret 2026-1"
    }
    assert words(record(None, request(salt="x")), record()) == {
        "sharing_domain": "the first has a salt, hashed with the fleet secret 2026-1, the second no salt"
    }
    rotated = FleetSecret(SECRET.key, "2026-2")
    found = words(record(None, request(salt="x")), record(None, request(salt="x", secret=rotated)))
    assert "it cannot be told whether the salts are equal" in found["sharing_domain"]


def test_other_registries_never_meet() -> None:
    tier = Dimension("acme.tier", Half.REQUEST, Kind.PERMISSION, "")
    registry = BUILT_IN.register(tier)
    other = record(None, request() | {"acme.tier": ABSENT}, registry=registry)
    comparison = compare(record(), other, kept)
    assert comparison.unregistered == ("acme.tier",)
    assert "only the worker of the second binds this dimension" in comparison.separations[0].words
    gold, iron = (
        record(None, request() | {"acme.tier": Known(f"acme.tier:{name}")}, registry=registry)
        for name in ("gold", "iron")
    )
    assert words(gold, iron) == {"acme.tier": "acme.tier:gold and acme.tier:iron"}


def test_of_a_worker_and_a_digest_the_worker_halves_are_compared() -> None:
    same = compare(record(only_worker=True), record(None, request("a")), kept)
    assert same.same
    assert same.words.startswith("Both workers are the same")
    assert words(record(only_worker=True), record(worker(weights=Known("label:run/1")))) == {
        "weights": "the first has by content, the second declared as run/1"
    }


def test_all_that_differs_is_named() -> None:
    first, second = record(worker(1.0), request("a", "x")), record(worker(2.0), request("b", "y"))
    assert compare(first, second, kept).words == (
        "Neither finds the other's entries: model_config, adapter and sharing_domain separate them."
    )


def test_a_description_holds_every_dimension_and_the_configurations() -> None:
    sides = describe(record(None, request("a"), names={"adapter": "standard"}), kept)
    assert [side.dimension for side in sides] == [*sorted(worker()), *sorted(request())]
    by_name = {side.dimension: side for side in sides}
    assert by_name["precision"].fields == {"compute_dtype": '"bfloat16"'}
    assert by_name["adapter"].words == "the adapter that its worker calls 'standard'"
    assert by_name["sharing_domain"].identity is None


@given(strategies.cases(min_size=1), st.data())
def test_what_separates_is_exactly_what_differs(case: tuple[Registry, Descriptor], data: st.DataObject) -> None:
    registry, descriptor = case
    other = data.draw(strategies.descriptors(registry))
    first, second = (Record(registry, d, evaluate(registry, d), False) for d in (descriptor, other))
    comparison = compare(first, second, nothing)
    differ = {
        name
        for ours, theirs in ((descriptor.worker, other.worker), (descriptor.request, other.request))
        for name in ours
        if ours[name] != theirs[name]
    }
    assert {separation.dimension for separation in comparison.separations} == differ
    assert comparison.same == (first.evaluation.digest == second.evaluation.digest)


@given(OBJECTS, OBJECTS)
def test_fields_differ_exactly_where_configurations_do(first: dict[str, Any], second: dict[str, Any]) -> None:
    found = differences(first, second, nothing)
    assert bool(found) == (canonical_json(first) != canonical_json(second))
    for field in found:
        assert field.first != field.second


@given(OBJECTS)
def test_a_field_that_is_only_in_one_is_absent_in_the_other(config: dict[str, Any]) -> None:
    assert {f.path: f.first for f in differences(config, {}, nothing)} == (dict(flat(config)) if config else {})


def test_a_draft_model_s_configuration_is_followed() -> None:
    drafts = [config_identity({"config": {"rope_theta": theta}, "resolved": {}}) for theta in (1, 2)]
    models = [{"config": {}, "resolved": {"draft_config": draft}} for draft in drafts]
    (field,) = differences(*models, kept)
    assert (field.path, field.first, field.second) == ("resolved.draft_config.config.rope_theta", "1", "2")


def test_true_and_one_differ() -> None:
    assert [f.path for f in differences({"a": True}, {"a": 1}, nothing)] == ["a"]


def test_configurations_as_deep_as_a_ledger_gives_are_compared() -> None:
    one: Any = 1
    other: Any = 2
    for _ in range(MAX_CONFIG_DEPTH):
        one, other = {"a": one}, {"a": other}
    (field,) = differences(one, other, nothing)
    assert field.path == ".".join("a" * MAX_CONFIG_DEPTH)


def test_deeper_ones_are_refused() -> None:
    for depth, accepted in ((MAX_CONFIG_DEPTH, True), (MAX_CONFIG_DEPTH + 1, False), (100_000, False)):
        data = b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)
        found = verify_config(data, hashlib.sha256(data).hexdigest())
        assert isinstance(found, dict) == accepted
