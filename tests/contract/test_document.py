from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract import (
    ABSENT,
    ContractError,
    Descriptor,
    ErrorCode,
    Kind,
    Known,
    KvprovError,
    Registry,
    Unknown,
    encode,
)
from kvprov.contract.document import DocumentError, evaluate, parse_document
from tests.contract import reference
from tests.contract.forms import as_document, as_halves
from tests.strategies import cases

SMALL = (
    '{"registry": {"worker": ["w"], "request": ["a"]}, '
    '"descriptor": {"worker": {"w": {"state": "known", "identity": "s:x"}}, "request": {"a": {"state": "absent"}}}}'
)


def test_a_document_becomes_a_registry_and_a_descriptor() -> None:
    registry, descriptor = parse_document(SMALL)
    assert (registry.worker, registry.request) == (("w",), ("a",))
    assert descriptor == Descriptor({"w": Known("s:x")}, {"a": ABSENT})
    assert {(d.kind, d.why) for d in registry} == {(Kind.COMPUTATIONAL, "")}


@given(cases())
def test_writing_and_reading_gives_the_same(case: tuple[Registry, Descriptor]) -> None:
    document = as_document(*case)
    for text in (json.dumps(document), json.dumps(document, ensure_ascii=False, indent=1).encode()):
        registry, descriptor = parse_document(text)
        assert as_halves(descriptor) == as_halves(case[1])
        assert encode(registry, descriptor) == encode(*case)


@given(cases())
def test_evaluate_gives_what_the_reference_gives(case: tuple[Registry, Descriptor]) -> None:
    found = evaluate(*case)
    expected = reference.evaluate(as_document(*case))
    assert {
        "enc_hex": found.enc.hex(),
        "digest_hex": found.digest.hex(),
        "worker_digest_hex": found.worker_digest.hex(),
        "text": found.text,
        "text_128": found.text_128,
    } == expected


def test_unknown_keeps_its_reason_and_has_no_digest() -> None:
    for value, reason in (('{"state": "unknown", "reason": "gone"}', "gone"), ('{"state": "unknown"}', "")):
        registry, descriptor = parse_document(SMALL.replace('{"state": "absent"}', value))
        unknown = descriptor.request["a"]
        assert isinstance(unknown, Unknown)
        assert unknown.reason == reason
        with pytest.raises(ContractError) as caught:
            evaluate(registry, descriptor)
        assert caught.value.code is ErrorCode.UNKNOWN_VALUE


def test_other_members_are_ignored_at_the_top_alone() -> None:
    assert parse_document(SMALL.replace("{", '{"name": [1.5, {"x": null}], ', 1)) == parse_document(SMALL)


@pytest.mark.parametrize("half", ["worker", "request"])
def test_a_doubled_name_in_the_descriptor_is_no_lost_value(half: str) -> None:
    descriptor = json.loads(SMALL)["descriptor"]
    member = json.dumps(descriptor[half])[1:-1]
    text = SMALL.replace(member, f"{member}, {member}")
    assert json.loads(text) == json.loads(SMALL), "a parser that forgets doubled members does not see it"
    with pytest.raises(ContractError) as caught:
        parse_document(text)
    assert caught.value.code is ErrorCode.DOUBLED_DIMENSION


def test_a_doubled_name_is_reported_before_a_bad_identity_and_after_a_bad_name() -> None:
    doubled = SMALL.replace('"a": {"state": "absent"}', '"a": {"state": "absent"}, "a": {"state": "absent"}')
    with pytest.raises(ContractError) as caught:
        parse_document(doubled.replace("s:x", "no colon"))
    assert caught.value.code is ErrorCode.DOUBLED_DIMENSION
    with pytest.raises(ContractError) as caught:
        parse_document(doubled.replace('"w": {', '"W": {'))
    assert caught.value.code is ErrorCode.BAD_NAME


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "document"),
        ("{", "document"),
        ("null", "document"),
        ("[]", "document"),
        ('"x"', "document"),
        ("{} {}", "document"),
        ("\ufeff{}", "document"),
        (b"\xff\xfe{\x00}\x00", "document"),
        (SMALL.encode("utf-16"), "document"),
        ("[" * 200_000, "document"),
        ('{"a":' * 200_000, "document"),
        (SMALL.replace("{", '{"x": NaN, ', 1), "document"),
        (SMALL.replace("{", '{"x": -Infinity, ', 1), "document"),
        (SMALL.replace("{", '{"x": ' + "1" * 10_000 + ", ", 1), "document"),
        (SMALL.replace("{", '{"registry": {"worker": [], "request": []}, ', 1), "document"),
        ('{"registry": {"worker": [], "request": []}}', "document"),
        ('{"descriptor": {"worker": {}, "request": {}}}', "document"),
        (SMALL.replace('"worker": ["w"], ', ""), "registry"),
        (SMALL.replace('["w"]', '["w"], "both": []'), "registry"),
        (SMALL.replace('["w"]', '"w"'), "registry.worker"),
        (SMALL.replace('["w"]', '{"w": 1}'), "registry.worker"),
        (SMALL.replace('["a"]', '["a", 1]'), "registry.request[1]"),
        (SMALL.replace('["a"]', "[null]"), "registry.request[0]"),
        (SMALL.replace('"request": {"a": {"state": "absent"}}', '"request": []'), "descriptor.request"),
        (SMALL.replace('{"state": "absent"}', "null"), "descriptor.request['a']"),
        (SMALL.replace('{"state": "absent"}', '"absent"'), "descriptor.request['a']"),
        (SMALL.replace('{"state": "absent"}', "{}"), "descriptor.request['a']"),
        (SMALL.replace('"absent"', '"Absent"'), "descriptor.request['a']"),
        (SMALL.replace('"absent"', "false"), "descriptor.request['a']"),
        (SMALL.replace('"absent"', '"absent", "identity": "s:x"'), "descriptor.request['a']"),
        (SMALL.replace('"absent"', '"absent", "state": "absent"'), "descriptor.request['a']"),
        (SMALL.replace('"absent"', '"unknown", "reason": 1'), "descriptor.request['a'].reason"),
        (SMALL.replace('"absent"', '"unknown", "identity": "s:x"'), "descriptor.request['a']"),
        (SMALL.replace(', "identity": "s:x"', ""), "descriptor.worker['w']"),
        (SMALL.replace('"s:x"', "1"), "descriptor.worker['w'].identity"),
        (SMALL.replace('"s:x"', '"s:x", "reason": ""'), "descriptor.worker['w']"),
    ],
)
def test_another_shape_is_refused_by_place(text: str | bytes, where: str) -> None:
    assert text not in (SMALL, SMALL.encode())
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    error = caught.value
    assert error.where == where
    assert error.message.startswith(f"{where}: ")
    assert error.advice
    assert isinstance(error, KvprovError)
    assert isinstance(error, ValueError)
    assert not isinstance(error, ContractError)


def test_the_shape_is_checked_before_the_rules() -> None:
    with pytest.raises(DocumentError):
        parse_document(SMALL.replace('["w"]', '["W", "W"]').replace('"absent"', "0"))


def test_no_control_character_of_a_document_reaches_the_message() -> None:
    hostile = "\u001b[2J" + "x" * 10_000
    with pytest.raises(DocumentError) as caught:
        parse_document(json.dumps({"registry": {"worker": [], "request": []}, "descriptor": {hostile: 1}}))
    with pytest.raises(DocumentError) as nested:
        parse_document(SMALL.replace('"a": {"state": "absent"}', json.dumps(hostile) + ": 1"))
    for error in (caught.value, nested.value):
        assert str(error).isprintable()
        assert len(str(error)) < 300


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["registry", "descriptor"]), st.sampled_from(["worker", "request", None]), JSON_VALUES)
def test_no_other_error_escapes(member: str, half: str | None, junk: object) -> None:
    document = json.loads(SMALL)
    if half is None:
        document[member] = junk
    else:
        document[member][half] = junk
    with contextlib.suppress(KvprovError):
        registry, descriptor = parse_document(json.dumps(document))
        assert len(encode(registry, descriptor)) > len("kv-provenance/1")


@given(st.binary(max_size=30) | st.text(max_size=30))
def test_junk_is_refused(junk: bytes | str) -> None:
    with pytest.raises(DocumentError):
        parse_document(junk)
