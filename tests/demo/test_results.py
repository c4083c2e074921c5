"""Each claim holds of good results, and each can fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvprov.demo.plan import PROCESSES, loadable
from tests.demo.made_up import ALONE, LOADABLE, PROMPT_TOKENS, REVIEWS, WANTED, WRONG, loads, results

PHASES = ["reference", "own_unbound", "cross_unbound", "cross_bound", "own_bound", "renamed_bound"]
FIELDS = ["name", "accuracy", "agreement", "tokens_loaded", "tokens_loadable", "prompt_tokens", "seconds"]


def failed(changes: dict[str, Any]) -> set[str]:
    return {claim.name for claim in results(**changes).claims() if not claim.holds}


def test_every_claim_holds_of_good_results() -> None:
    assert failed({}) == set()
    assert results().holds()


# Alone, 197 of 200 are right.
NINETEEN_POINTS = WANTED[:159] + WRONG[159:]
TWENTY_POINTS = WANTED[:157] + WRONG[157:]


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"cross_unbound": loads(A=int(PROMPT_TOKENS * 0.7) - 1)}, "foreign_read"),
        # As much was loaded, but by the kernel's account it was B's own.
        ({"cross_unbound": loads(B=LOADABLE)}, "foreign_read"),
        ({"cross_unbound": {"answers": NINETEEN_POINTS}}, "foreign_harm"),
        ({"cross_unbound": {"answers": ALONE}}, "foreign_harm"),
        ({"cross_bound": loads(A=128)}, "bound_reads_nothing_foreign"),
        ({"own_bound": loads(A=128, B=LOADABLE - 128)}, "bound_reads_nothing_foreign"),
        # A store without A's state proves nothing.
        ({"cross_bound": {"tokens_offered": {}}}, "bound_reads_nothing_foreign"),
        ({"cross_bound": {"tokens_offered": {"A": LOADABLE - 128}}}, "bound_reads_nothing_foreign"),
        ({"renamed_bound": loads(A=LOADABLE)}, "bound_reads_nothing_foreign"),
        ({"cross_bound": {"answers": (*ALONE[:-1], " maybe")}}, "bound_answers_as_alone"),
        ({"own_unbound": loads(B=LOADABLE - 128)}, "own_read_is_complete"),
        ({"own_bound": loads(B=LOADABLE - 128)}, "own_read_is_kept"),
        ({"renamed_bound": loads()}, "renamed_read_is_kept"),
        ({"renamed_bound": {"adapter_sha256": "c" * 64}}, "adapters_are_as_said"),
        ({"seed_bound": {"adapter_sha256": "b" * 64}}, "adapters_are_as_said"),
        ({"renamed_bound": {"adapter_folder": "inverted"}}, "adapters_are_as_said"),
        ({"own_unbound": {"tokens_cached": LOADABLE - 32}}, "measures_agree"),
        ({"cross_unbound": {"tokens_loaded": LOADABLE - 32}}, "measures_agree"),
        ({"cross_unbound": {"tokens_read": {"A": LOADABLE + 128}}}, "measures_agree"),
    ],
)
def test_each_claim_can_fail(changes: dict[str, Any], claim: str) -> None:
    assert claim in failed(changes)
    assert not results(**changes).holds()


def test_thresholds_are_inclusive() -> None:
    assert failed({"cross_unbound": loads(A=int(PROMPT_TOKENS * 0.7))}) == set()
    assert failed({"cross_unbound": {"answers": TWENTY_POINTS}}) == set()


def test_nothing_loaded_anywhere_is_no_success() -> None:
    nothing = {name: loads() for name in ("own_unbound", "cross_unbound", "own_bound", "renamed_bound")}
    assert failed(nothing) >= {"foreign_read", "own_read_is_complete"}


def test_json_has_exactly_the_phases_and_fields() -> None:
    document = json.loads(json.dumps(results().to_json()))
    assert [phase["name"] for phase in document["phases"]] == PHASES
    assert all(list(phase) == FIELDS for phase in document["phases"])
    by_name = {phase["name"]: phase for phase in document["phases"]}
    assert by_name["reference"]["accuracy"] == 197 / REVIEWS
    assert by_name["reference"]["agreement"] == 1.0
    assert by_name["cross_unbound"]["accuracy"] == 0.0
    assert by_name["cross_unbound"]["agreement"] == 3 / REVIEWS
    assert by_name["cross_unbound"]["tokens_loaded"] == LOADABLE
    assert by_name["cross_bound"]["tokens_loaded"] == 0
    assert document["holds"] is True
    assert [process["name"] for process in document["processes"]] == [process.name for process in PROCESSES]


def test_json_says_which_claim_does_not_hold() -> None:
    document = results(cross_bound=loads(A=128)).to_json()
    assert document["holds"] is False
    assert [claim["name"] for claim in document["claims"] if not claim["holds"]] == ["bound_reads_nothing_foreign"]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 0), (2, 0), (33, 0), (34, 32), (65, 32), (66, 64), (129, 96), (130, 128), (153, 128)]
)
def test_loadable(tokens: int, expected: int) -> None:
    assert loadable(tokens, 32) == expected


def test_the_plan_compares_what_it_says() -> None:
    by_name = {process.name: process for process in PROCESSES}
    cross, bound = by_name["cross_unbound"], by_name["cross_bound"]
    seeds = {process.store: process for process in PROCESSES if not process.reported}
    # The two cross reads differ in nothing but kvprov: same reader, a store that A alone has filled, same id.
    assert cross.adapter == bound.adapter
    assert seeds[cross.store].adapter == seeds[bound.store].adapter != cross.adapter
    assert seeds[cross.store].adapter.lora_id == cross.adapter.lora_id
    assert (cross.mode, bound.mode) == ("off", "enforce")
    renamed, own = by_name["renamed_bound"].adapter, by_name["own_bound"].adapter
    assert renamed.source == own.source
    assert renamed.copied
    assert (renamed.name, renamed.lora_id) != (own.name, own.lora_id)
