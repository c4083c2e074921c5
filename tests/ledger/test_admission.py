from __future__ import annotations

from kvprov.ledger.admission import HOUR, Admission, Limits, Remembered

LIMITS = Limits(plain=5, first=3, again=2, remembered=10)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admitted(admission: Admission, names: list[str], *, chosen: bool) -> list[str]:
    return [name for name in names if admission.admit(name, chosen=chosen) is not None]


def test_what_clients_do_not_choose_has_a_rate_of_its_own() -> None:
    clock = Clock()
    admission = Admission(LIMITS, clock)
    assert admitted(admission, list("abcdefg"), chosen=True) == list("abc")
    assert admitted(admission, list("hijklmn"), chosen=False) == list("hijkl")


def test_tokens_come_back_with_time_and_never_more_than_an_hour_s() -> None:
    clock = Clock()
    admission = Admission(LIMITS, clock)
    assert len(admitted(admission, list("abcdef"), chosen=True)) == 3
    clock.now += HOUR / 3
    assert len(admitted(admission, list("ghi"), chosen=True)) == 1
    clock.now += 100 * HOUR
    assert len(admitted(admission, list("jklmnop"), chosen=True)) == 3


def test_a_tenant_that_comes_back_is_recorded_after_a_flood() -> None:
    admission = Admission(LIMITS, Clock())
    assert len(admitted(admission, [f"flood-{n}" for n in range(1000)], chosen=True)) == 3
    assert admission.admit("tenant", chosen=True) is None
    assert admission.admit("tenant", chosen=True) is not None


def test_what_was_not_used_is_given_back() -> None:
    admission = Admission(LIMITS, Clock())
    for _ in range(20):
        bucket = admission.admit("a", chosen=True)
        assert bucket is not None
        bucket.give_back()


def test_memory_is_bounded() -> None:
    remembered = Remembered(10)
    for n in range(100):
        remembered.add(n)
    assert len(remembered) == 10
    assert 99 in remembered
    assert 89 not in remembered
