from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.check.verdicts import Verdict, bits_left, judge, overall


def test_a_pair() -> None:
    assert judge(must_separate=True, same_key=True) is Verdict.OMISSION
    assert judge(must_separate=True, same_key=False) is Verdict.SOUND
    assert judge(must_separate=False, same_key=True) is Verdict.SHARED
    assert judge(must_separate=False, same_key=False) is Verdict.OVER_SEPARATED


@given(st.lists(st.sampled_from([v for v in Verdict if v is not Verdict.NOT_TESTED])))
def test_a_dimension_is_as_bad_as_its_worst_pair(verdicts: list[Verdict]) -> None:
    found = overall(verdicts)
    if not verdicts:
        assert found is Verdict.NOT_TESTED
    elif Verdict.OMISSION in verdicts:
        assert found is Verdict.OMISSION
    elif Verdict.OVER_SEPARATED in verdicts:
        assert found is Verdict.OVER_SEPARATED
    else:
        assert found in verdicts
        assert found is (Verdict.SOUND if Verdict.SOUND in verdicts else Verdict.SHARED)
    assert all(overall(order) is found for order in itertools.islice(itertools.permutations(verdicts), 6))


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_bits_are_estimated_from_collisions(bits: int) -> None:
    import hashlib

    values = 2048
    kept = [int.from_bytes(hashlib.sha256(str(i).encode()).digest()) >> (256 - bits) for i in range(values)]
    collisions = sum(kept.count(value) * (kept.count(value) - 1) // 2 for value in set(kept))
    assert abs(bits_left(values, collisions) - bits) < 0.5
