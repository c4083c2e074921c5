from __future__ import annotations

import enum
import hashlib
import json
import math
import types
from collections import OrderedDict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprov.errors import KvprovError
from kvprov.identity import canonical_json, config_identity
from tests.identity import reference


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    ONE = 1


EQUAL = [
    (10000, 10000.0),
    (0, -0.0),
    (2**53 - 1, float(2**53 - 1)),
    (2**53, float(2**53)),
    (2**60, float(2**60)),
    (-(2**70), -float(2**70)),
    (10**22, 1e22),
    ([1, "a"], (1.0, "a")),
    ({"a": 1, "b": [2]}, OrderedDict([("b", (2.0,)), ("a", 1.0)])),
    ({"a": 1}, types.MappingProxyType({"a": 1})),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_equal_values_have_equal_bytes(left: object, right: object) -> None:
    assert canonical_json(left) == canonical_json(right)


DIFFERENT = [
    None, True, False, 0, 1, -1, 0.5, 1e-7, "", "0", "1", "true", "null", "a", "A", "é", "e\u0301", "\n", "\\n",
    [], [[]], [0], ["0"], [1, 2], [2, 1], {}, {"a": None}, {"a": 1}, {"a": [1]}, {"b": 1}, [{}],
    math.nan, math.inf, -math.inf, "NaN", "Infinity",
    {"$float": "NaN"}, {"$float": "Infinity"}, {"$$float": "NaN"}, {"$$$float": "NaN"}, {"float": "NaN"},
    2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, -(2**53) - 1, 2**2000, 2**2000 + 1, 1.7976931348623157e308,
    {"$int": hex(2**53 + 1)}, {"$$int": hex(2**53 + 1)}, hex(2**53 + 1), {"$": 1}, {"$$": 1}, {"": 1},
    "\U00010000", "\ufb01", {"\U00010000": 1, "\ufb01": 2}, {"\U00010000": 2, "\ufb01": 1},
]  # fmt: skip


def test_different_values_have_different_bytes() -> None:
    forms = [canonical_json(value) for value in DIFFERENT]
    assert len(set(forms)) == len(DIFFERENT)


def test_is_rfc_8785() -> None:
    # RFC 8785, section 3.2.2, its example.
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
    }
    assert canonical_json(value).decode() == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    # Names sort by their UTF-16, in which U+10000 comes before U+FB01.
    assert canonical_json({"\ufb01": 1, "\U00010000": 2}).decode() == '{"\U00010000":2,"\ufb01":1}'


REFUSED = [
    ({"a": {"b": {1, 2}}}, "['a']['b'] is of type set"),
    ({"a": [0, Colour.RED]}, "['a'][1] is of type Colour"),
    ({"a": Level.ONE}, "['a'] is of type Level"),
    ({"a": Path("/x")}, "['a'] is of type"),
    ({"a": b"x"}, "['a'] is of type bytes"),
    ({"a": Decimal(1)}, "['a'] is of type Decimal"),
    ({"a": 1j}, "['a'] is of type complex"),
    ({"a": object}, "['a'] is of type type"),
    ({"a": {1: 2}}, "['a'] has a name that is no text: 1"),
    ({"a": {Colour.RED: 2}}, "['a'] has a name that is no text"),
    ({"a": "\ud800"}, "['a'] holds half a surrogate pair"),
    ({"a": {"\udfff": 1}}, "a name in the value['a'] holds half a surrogate pair"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED)
def test_refuses_and_names_the_field(value: object, reason: str) -> None:
    with pytest.raises(KvprovError) as caught:
        canonical_json(value)
    assert reason in str(caught.value)
    assert caught.value.advice


def test_deep_and_endless_values_give_one_error() -> None:
    canonical_json(json.loads("[" * 50 + "]" * 50))
    endless: list[object] = []
    endless.append(endless)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(KvprovError, match="too deeply"):
            canonical_json(value)


def test_the_identity_names_its_scheme() -> None:
    identity = config_identity({"rope_theta": 10000})
    assert identity == config_identity({"rope_theta": 10000.0})
    assert identity == "config-v1-sha256:" + hashlib.sha256(b'{"rope_theta":10000}').hexdigest()
    assert identity != config_identity({"rope_theta": "10000"})


NUMBERS = (
    st.integers()
    | st.integers(-(2**80), 2**80)
    | st.sampled_from([2**53, 2**53 - 1, 2**53 + 1, 2**1024, 0.0, -0.0, 5e-324, 1e21, 1e20, 123456789012345680000.0])
    | st.floats()
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
    ["$float", "$int", "$", "$$float"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(VALUES)
def test_agrees_with_the_reference(value: Any) -> None:
    assert canonical_json(value).decode() == reference.canonical(value)


def decoded(value: Any) -> Any:
    """Return what a canonical form says, which shows that no two values share one."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$float"}:
        return float(value["$float"])
    if value.keys() == {"$int"}:
        return int(value["$int"], 16)
    return {name.replace("$", "", 1) if name.startswith("$") else name: decoded(v) for name, v in value.items()}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right and (type(left) is type(right) or (type(left) in (int, float) and type(right) in (int, float)))


@settings(deadline=None)
@given(VALUES)
def test_a_form_says_its_value(value: Any) -> None:
    # Whole doubles of 2**53 and more are written in digits that only a double reads back.
    parsed = json.loads(canonical_json(value), parse_int=lambda text: int(float(text)))
    assert same(decoded(parsed), value)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_forms_are_equal_exactly_when_values_are(left: Any, right: Any) -> None:
    assert (canonical_json(left) == canonical_json(right)) == same(left, right)
