"""Names, identities, values and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract import (
    ABSENT,
    Absent,
    ContractError,
    Dimension,
    ErrorCode,
    Half,
    Kind,
    Known,
    KvprovError,
    Unknown,
    Value,
)
from kvprov.contract.document import DocumentError
from tests.contract import reference
from tests.strategies import identities, names

# Text that is nearly a name or an identity: what is generated at random alone is almost never one.
NEARLY = st.text("aZ09_.-: \n\u00e9", max_size=6) | st.text(max_size=6)


def accepts_name(name: str) -> bool:
    try:
        Dimension(name, Half.WORKER, Kind.COMPUTATIONAL, "")
    except ContractError as error:
        return (error.code, error.subject) != (ErrorCode.BAD_NAME, name)
    return True


def accepts_identity(identity: str) -> bool:
    try:
        Known(identity)
    except ContractError as error:
        return error.code is not ErrorCode.BAD_IDENTITY
    return True


@given(names())
def test_names_are_accepted(name: str) -> None:
    assert accepts_name(name)


@given(NEARLY | st.tuples(names(), NEARLY).map("".join))
def test_names_follow_the_grammar(name: str) -> None:
    assert accepts_name(name) == reference.is_name(name)


@given(identities())
def test_identities_are_accepted(identity: str) -> None:
    assert Known(identity).identity == identity


@given(NEARLY | st.tuples(identities(), NEARLY).map("".join) | st.tuples(NEARLY, identities()).map("".join))
def test_identities_follow_the_grammar(identity: str) -> None:
    assert accepts_identity(identity) == reference.is_identity(identity)


@pytest.mark.parametrize(("length", "accepted"), [(1023, True), (1024, True), (1025, False), (5000, False)])
def test_the_length_of_an_identity(length: int, accepted: bool) -> None:
    assert accepts_identity("s:".ljust(length, "x")) is accepted


@pytest.mark.parametrize("wrong", [None, 7, b"s:x", ["s:x"]])
def test_what_is_no_text_is_neither_name_nor_identity(wrong: object) -> None:
    with pytest.raises(ContractError) as caught:
        Known(wrong)  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.BAD_IDENTITY
    with pytest.raises(ContractError) as caught:
        Dimension(wrong, Half.WORKER, Kind.COMPUTATIONAL, "")  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.BAD_NAME


def test_values_compare_by_state_and_identity() -> None:
    states: list[Value] = [ABSENT, Unknown(), Known("s:x")]
    assert [[one == other for other in states] for one in states] == [[i == j for j in range(3)] for i in range(3)]
    assert Absent() == ABSENT
    assert Known("s:x") == Known("s:x") != Known("s:y")
    assert Unknown("one reason") == Unknown("another")
    assert hash(Unknown("one reason")) == hash(Unknown("another"))


def test_a_long_identity_is_cut_in_the_message() -> None:
    with pytest.raises(ContractError) as caught:
        Known("s:" + "x" * 5000)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "error",
    [
        ContractError(ErrorCode.BAD_NAME, "A", "It is bad.", "Make it good."),
        DocumentError("registry.worker[0]", "text is expected"),
        KvprovError("It is bad.", "Make it good."),
    ],
)
def test_errors_say_what_to_do_and_survive_the_way_to_another_process(error: KvprovError) -> None:
    assert str(error) == f"{error.message} {error.advice}"
    assert error.advice.endswith(".")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.args == error.args


def test_advice_may_be_left_out() -> None:
    assert str(KvprovError("It is bad.")) == "It is bad."
