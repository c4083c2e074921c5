"""Six cases in which a worker finds entries of another provenance, each with a prefix of more than 2,048 tokens.

An adapter replaced in place, the weights' version, their precision, the element type, another domain, and the KV dtype
with each policy of waiting for the store. Stock fails in ways of its own, which are measured here as well. The rotary
base and the client's namespace complete the dimensions.
"""

from __future__ import annotations

import enum

import pytest

from tests.support.sglang import cases
from tests.support.sglang.case_runner import BOUND_S, Measured, Runner
from tests.support.sglang.cases import OWN, PREFIX, PROBES, Case
from tests.support.sglang.engine import PAGE, RELEASE
from tests.support.sglang.models import LongModels
from tests.support.sglang.processes import Processes
from tests.support.sglang.results import declined, local, record, rows
from tests.support.steps import same

pytestmark = pytest.mark.engine


class Stock(enum.Enum):
    """What SGLang does by itself."""

    READS = "reads the foreign state in full, and answers otherwise"
    DECLINES = "finds the foreign entry and does without it"
    HANGS = "finds the foreign entry and never answers"
    SEPARATE = "has another key"


SHORT = Stock.HANGS if RELEASE == "0.5.20" else Stock.DECLINES
"""Entries that are shorter than the reader's: the prefetching thread of 0.5.20 ends, and who waits for it waits on."""

STOCK = {
    cases.ADAPTER: Stock.READS,
    cases.WEIGHTS: Stock.READS,
    cases.PRECISION: Stock.READS,
    cases.ROTARY_BASE: Stock.READS,
    cases.HALF: Stock.READS,
    cases.SINGLE: SHORT,
    cases.OTHER_SALT: Stock.SEPARATE,
    cases.NO_SALT: Stock.SEPARATE,
    cases.NEW_SALT: Stock.SEPARATE,
    cases.NAMESPACE: Stock.SEPARATE,
    **dict.fromkeys(cases.NARROW_KV, Stock.READS),
    **{case: SHORT if case.policy == cases.WAIT else Stock.DECLINES for case in cases.WIDE_KV},
}
CASES = tuple(STOCK)
OPENED = tuple(case for case in CASES if case.withheld)


@pytest.fixture(scope="module")
def measured(processes: Processes, models: LongModels, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    prompts = dict(zip((OWN, *CASES), models.long_prompts(1 + len(CASES)), strict=True))
    outcome = Runner(processes, models, tmp_path_factory.mktemp("cases"), PAGE).run(CASES, prompts)
    record(rows(outcome, PAGE))
    return outcome


def test_own_state_is_read_in_full(measured: Measured) -> None:
    """The control of everything below: the identical rerun hits, with every policy, bound as unbound."""
    assert measured.loadable[OWN] >= PREFIX
    assert set(measured.control) == {(b, policy) for b in ("unbound", "bound") for policy in cases.POLICIES}
    for attempt in measured.control.values():
        assert [attempt.stored, local(attempt)] == [measured.loadable[OWN], 0]
        assert same([attempt.answer], [measured.references[OWN]])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_stock(measured: Measured, case: Case) -> None:
    """What stock does wrong, so that the bound case below can be told from it."""
    attempt, full = measured.foreign["unbound", case], measured.loadable[case]
    assert full >= PREFIX
    assert declined(measured, "unbound", case) == (STOCK[case] in (Stock.DECLINES, Stock.HANGS))
    if STOCK[case] is Stock.HANGS:
        assert attempt.answer is None
        assert attempt.seconds >= BOUND_S
        assert measured.again["unbound", case].answer is None, "nor is it answered later"
        return
    correct = same([attempt.answer], [measured.references[case]])
    if STOCK[case] is Stock.READS:
        assert attempt.stored == full
        assert not correct
    else:
        assert attempt.stored == 0
        assert correct
    if STOCK[case] is Stock.DECLINES:
        # The foreign entry stands where its own would.
        assert measured.again["unbound", case].stored == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_bound_reads_none_of_others_and_all_of_its_own(measured: Measured, case: Case) -> None:
    attempt, again = measured.foreign["bound", case], measured.again["bound", case]
    assert not declined(measured, "bound", case)
    assert [attempt.stored, local(attempt)] == [0, 0]
    assert attempt.seconds < BOUND_S
    # Another process of the same configuration.
    assert [again.stored, local(again)] == [measured.loadable[case], 0]
    for answered in (attempt, again):
        assert same([answered.answer], [measured.references[case]])


@pytest.mark.parametrize("case", OPENED, ids=lambda case: case.label)
def test_withholding_its_dimensions_reopens_a_case(measured: Measured, case: Case) -> None:
    attempt = measured.foreign["withheld", case]
    assert f"UNSAFE: withheld={','.join(case.dimensions)}" in measured.logs["withheld", case]
    assert attempt.stored == measured.loadable[case]
    assert same([attempt.answer], [measured.references[case]]) != case.computational


@pytest.mark.parametrize("withheld", sorted({case.dimensions for case in OPENED}), ids=",".join)
def test_withholding_dimensions_reopens_no_other(measured: Measured, withheld: tuple[str, ...]) -> None:
    probes = [probe for probe in PROBES if set(probe.dimensions).isdisjoint(withheld)]
    assert probes
    for probe in probes:
        attempt = measured.probes[withheld, probe]
        assert [attempt.stored, local(attempt)] == [0, 0]


@pytest.mark.parametrize("case", [case for case in CASES if case.exchanges], ids=lambda case: case.label)
def test_what_was_there_before_is_read_again_after_a_rollback(measured: Measured, case: Case) -> None:
    attempt = measured.rollback[case]
    assert [attempt.stored, local(attempt)] == [measured.loadable[case], 0]
    assert not same([attempt.answer], [measured.references[case]])
