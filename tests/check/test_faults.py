"""Every planted fault is caught and named, and nothing else is said of it."""

from __future__ import annotations

import pytest

from kvprov.check import Checker, CheckError, Fault, Report, Verdict
from tests.check import support
from tests.check.support import COMPUTATIONAL, PERMISSION

ALL = COMPUTATIONAL | PERMISSION


def named(report: Report) -> set[tuple[str, Verdict, Fault]]:
    return {(finding.dimension, finding.verdict, finding.fault) for finding in report.all_findings}


def test_a_sound_key_of_somebodys_own(checker: Checker) -> None:
    report = checker.judge(support.sound)
    assert named(report) == set()
    assert report.verdicts == dict.fromkeys(sorted(ALL), Verdict.SOUND)
    assert report.control.process is True
    assert report.exit_code == 0


OMISSION, OVER = Verdict.OMISSION, Verdict.OVER_SEPARATED


@pytest.mark.parametrize(
    ("key", "findings"),
    [
        (support.drops_the_third_tensor, {("adapter", OMISSION, Fault.TENSOR)}),
        (support.drops_names_of_tensors, {("adapter", OMISSION, Fault.TENSOR_NAMES)}),
        (support.drops_the_adapters_configuration, {("adapter", OMISSION, Fault.ADAPTER_CONFIG)}),
        (support.adapter_of_16_bits, {("adapter", OMISSION, Fault.TRUNCATED)}),
        (
            support.of_16_bits,
            {("adapter", OMISSION, Fault.TRUNCATED), ("sharing_domain", OMISSION, Fault.TRUNCATED)},
        ),
        (
            support.on_the_path,
            {(d, v, Fault.PATH) for d in ("adapter", "weights") for v in (OMISSION, OVER)},
        ),
        (
            support.on_the_path_and_times,
            {(d, v, Fault.PATH) for d in ("adapter", "weights") for v in (OMISSION, OVER)},
        ),
        (
            support.on_the_name,
            {(d, v, Fault.NAME) for d in ("adapter", "weights") for v in (OMISSION, OVER)},
        ),
        (support.joins_without_lengths, {("sharing_domain", OMISSION, Fault.JOINED)}),
        # Of the last dimension of all, no other one stands behind.
        (support.joins_identities, {(d, OMISSION, Fault.JOINED) for d in ALL - {"sharing_domain"}}),
        (support.joins_named_identities, {(d, OMISSION, Fault.JOINED) for d in ALL - {"sharing_domain"}}),
        (support.joins_tokens_and_salt, {("sharing_domain", OMISSION, Fault.JOINED)}),
        (
            support.joins_adapter_and_salt,
            {("sharing_domain", OMISSION, Fault.JOINED), ("adapter", OVER, Fault.NAME)},
        ),
        (support.takes_none_for_a_text, {("sharing_domain", OMISSION, Fault.ABSENT)}),
        (support.differs_by_process, {("adapter", OVER, Fault.PROCESS)}),
        (support.knows_only_whether_there_is_an_adapter, {("adapter", OMISSION, Fault.NOT_BOUND)}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault(checker: Checker, key: object, findings: set[tuple[str, Verdict, Fault]]) -> None:
    assert callable(key)
    report = checker.judge(key)
    assert report.control.passed
    assert named(report) >= findings
    # Nothing of other dimensions, and no other kind of fault.
    assert {f[0] for f in named(report)} == {f[0] for f in findings}
    assert {f[2] for f in named(report)} <= {f[2] for f in findings}
    omitted = {dimension for dimension, verdict, _ in findings if verdict is OMISSION}
    assert set(report.having(OMISSION)) == omitted
    assert report.exit_code == (1 if omitted else 0)


def test_which_tensor_is_left_out_is_named(checker: Checker) -> None:
    [finding] = checker.judge(support.drops_the_third_tensor)["adapter"].findings
    third = sorted(support.tensors(support.ADAPTERS[0]))[2]
    assert f"the tensor {third} have one key" in finding.message


def test_how_many_bits_are_left_is_said(checker: Checker) -> None:
    report = checker.judge(support.of_16_bits)
    [finding] = report["sharing_domain"].findings
    assert any(f"about {bits} bits" in finding.message for bits in (15, 16, 17))
    # The two adapters that have one key were run, and their state differs.
    [pair] = [pair for pair in report["adapter"].pairs if pair.how == "two of many"]
    assert pair.difference is not None
    assert pair.difference.largest


def test_a_key_that_never_shares_is_over_separated_and_not_sound(checker: Checker) -> None:
    report = checker.judge(support.never_shares)
    assert set(report.verdicts.values()) == {Verdict.OVER_SEPARATED}
    [finding] = report.all_findings
    assert finding.fault is Fault.NEVER_SHARES
    assert (report.control.state, report.control.key) == (True, False)
    assert report.exit_code == 4


def test_a_function_made_in_a_test_is_judged_in_this_process_alone(checker: Checker) -> None:
    report = checker.judge(lambda case: support.differs_by_process(case))
    assert report["adapter"].verdict is Verdict.SOUND
    assert report.control.process is None
    assert "cannot import" in report.control.note


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (support.fails, "LookupError: no rank for None"),
        (support.returns_a_number, "returned a int"),
        ("no_such_module_here:key", "cannot be imported"),
        ("tests.check.support:nothing", "cannot be imported"),
        ("tests.check.support:MODEL", "no function"),
        ("key", "no key function"),
    ],
)
def test_a_key_function_that_cannot_be_used(checker: Checker, key: object, says: str) -> None:
    with pytest.raises(CheckError, match=says):
        checker.judge(key)  # type: ignore[arg-type]
