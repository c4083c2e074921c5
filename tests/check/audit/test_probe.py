"""No verdict is written down: connectors that are made up here are reported as they were made up. No engine runs."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from kvprov.check.audit import FACTS, Budget, EngineReport, Report, Row, Scenario, Subject, audit
from kvprov.check.audit.probe import cells
from kvprov.check.audit.scenario import BASE, DIMENSIONS
from kvprov.check.audit.subject import AuditError
from kvprov.contract.dimensions import BUILT_IN
from tests.check.audit.generated import Generated, Mode, bound_everywhere, connectors, digest

QUICK = Budget(samples=96, seconds=5)


def texts(found: dict[str, Any]) -> dict[str, str]:
    return {name: cell.text for name, cell in found.items()}


def test_the_facts_cover_every_dimension_and_change_one_thing_each() -> None:
    assert set(DIMENSIONS) == {dimension.name for dimension in BUILT_IN}
    for fact in FACTS:
        others = [fact.vary(BASE, index) for index in range(fact.values or 5)]
        assert len({*others, BASE}) == len(others) + 1, fact
        assert all(not fact.values or fact.vary(BASE, 1) == others[0] for _ in "x"), fact
    assert all(any(f.dimension == name and not f.carrier for f in FACTS) for name in DIMENSIONS)


@settings(max_examples=40)
@given(connectors())
def test_a_made_up_connector_is_reported_as_it_was_made_up(connector: Generated) -> None:
    assert texts(cells("it", connector.keys, QUICK)) == connector.expected()


@pytest.mark.parametrize(
    ("dimension", "hidden"), [("weights", False), ("sharing_domain", False), ("adapter", False), ("adapter", True)]
)
def test_sixteen_bits_are_found_even_if_they_are_hashed_again(dimension: str, hidden: bool) -> None:
    # Other values in each run: a number of collisions that is right by chance would not last.
    noise = random.SystemRandom().randbytes(8)
    modes = bound_everywhere(**{dimension: Mode.TRUNCATED})
    connector = Generated(modes, {dimension: 16}, hidden, noise)
    budget = Budget(samples=4096, seconds=30) if hidden else QUICK
    found = texts(cells("it", connector.keys, budget))
    assert found == connector.expected()
    assert found[dimension] == "truncated to 16 bits"


def test_an_omission_of_one_fact_is_named() -> None:
    def keys(scenario: Scenario) -> list[bytes]:
        return [digest(replace(scenario, sliding_window=0, kv_layout=""))]

    found = texts(cells("it", keys, QUICK))
    assert found["model_config"] == "omitted: sliding_window"
    assert found["kv_representation"] == "omitted: layout"
    assert found["weights"] == "bound"


def test_what_enters_the_first_key_alone_is_omitted_from_the_others() -> None:
    def keys(scenario: Scenario) -> list[bytes]:
        return [digest(scenario), digest(replace(scenario, salt=""))]

    assert texts(cells("it", keys, QUICK)) == bound_texts(sharing_domain="omitted")


def bound_texts(**others: str) -> dict[str, str]:
    return {name: others.get(name, "bound") for name in DIMENSIONS}


def test_carriers_are_named_also_where_the_thing_itself_is_bound() -> None:
    found = cells("it", lambda scenario: [digest(scenario)], QUICK)
    assert texts(found) == bound_texts()
    assert found["adapter"].carriers == ("handle", "name", "path")
    by_content = Generated(bound_everywhere()).keys
    assert cells("it", by_content, QUICK)["adapter"].carriers == ()


def test_names_and_paths_together() -> None:
    def keys(scenario: Scenario) -> list[bytes]:
        adapter = scenario.adapter and replace(scenario.adapter, content=0)
        served = replace(scenario, weights=0, model_folder="", model_name="", adapter=adapter)
        return [digest(served)]

    found = texts(cells("it", keys, QUICK))
    assert found["adapter"] == "by handle and name and path only"
    assert found["weights"] == "by name only"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (lambda _: [random.SystemRandom().randbytes(8)], "two keys to equal scenarios"),
        (lambda s: [digest(replace(s, prompt=0))], "one key to other tokens"),
        (lambda s: [digest(s), digest(replace(s, prompt=0))], "one key to other tokens"),
        (lambda _: [], "made no key"),
        (lambda _: [b""], "made no key"),
        (lambda _: ["text"], "made no key"),
        (lambda s: [digest(s.nothing)], "AttributeError"),
    ],
    ids=["random", "constant", "constant second", "none", "empty", "no bytes", "fails"],
)
def test_what_cannot_be_judged_is_no_verdict(keys: Any, why: str) -> None:
    with pytest.raises(AuditError, match=why):
        cells("it", keys, QUICK)
    (row,) = audit([Subject("it", "It", keys)])
    assert why in row.error
    assert row.native is None
    assert Report((EngineReport("e", rows=(row,)),)).failures


def test_a_report_comes_back_from_json_and_says_what_is_wrong() -> None:
    leaky = Generated(bound_everywhere(adapter=Mode.OMITTED, weights=Mode.BY_PATH))
    whole = Generated(bound_everywhere())
    (row,) = audit([Subject("a (b)", "A", leaky.keys, whole.keys, budget=QUICK)])
    engine = EngineReport("engine", {"package": "1"}, (row,), {"R": "why"}, ("Stranger",), {"S": "not installed"})
    assert EngineReport.from_json(json.loads(json.dumps(engine.to_json()))) == engine
    # What stock keys leave out is no reason to fail; what nobody knows is.
    assert Report((engine,)).findings == ["engine: Stranger is not known to the audit"]
    (swapped,) = audit([Subject("a", "A", whole.keys, leaky.keys, budget=QUICK)])
    assert Report((EngineReport("engine", rows=(swapped,)),)).findings == [
        "engine: a, bound: weights is by path only",
        "engine: a, bound: adapter is omitted",
    ]


def test_a_subject_without_binding_says_why() -> None:
    (row,) = audit([Subject("a", "A", Generated(bound_everywhere()).keys, budget=QUICK)])
    assert row == Row("a", "A", row.native, None, "kvprov does not bind it")


def test_hashes_in_binary_and_in_text_are_read_alike() -> None:
    for spell in (bytes, lambda raw: raw.hex().encode(), lambda raw: b"x/" + raw.hex().upper().encode() + b"/y"):

        def keys(scenario: Scenario, spell: Any = spell) -> list[bytes]:
            salt = hashlib.sha256(scenario.salt.encode()).digest()[:6]
            return [spell(digest(replace(scenario, salt=""))[:16] + salt)]

        assert texts(cells("it", keys, QUICK)) == bound_texts(sharing_domain="truncated to 48 bits")
