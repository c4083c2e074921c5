"""Records: what is written is read again, and nothing but what encodes to its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract import Descriptor, Registry
from kvprov.contract.digest import digest, worker_digest
from kvprov.contract.key import DigestBits, key_text
from kvprov.ledger.record import (
    MAX_NOTE_CHARACTERS,
    MAX_RECORD_BYTES,
    Record,
    compose,
    digest_prefix,
    record_name,
    verify,
)
from tests import strategies

NOTES = st.dictionaries(st.text(max_size=20), st.text(max_size=400), max_size=20)


@given(strategies.cases(), NOTES, NOTES)
def test_a_record_is_read_as_written(
    case: tuple[Registry, Descriptor], facts: dict[str, str], names: dict[str, str]
) -> None:
    registry, descriptor = case
    data = compose(registry, descriptor.worker, descriptor.request, facts=facts, names=names)
    assert data.isascii()
    assert all(byte >= 0x20 or byte == 0x0A for byte in data)
    whole = digest(registry, descriptor)
    for asked in (whole, whole[:16]):
        record = verify(data, asked, worker_only=False)
        assert isinstance(record, Record)
        assert record.descriptor == descriptor
        assert record.registry.names("worker") == registry.names("worker")  # type: ignore[arg-type]
        assert record.text == key_text(whole)
    assert all(len(text) <= MAX_NOTE_CHARACTERS for text in [*record.facts.values(), *record.names])


@given(strategies.cases())
def test_a_worker_s_record_holds_no_request(case: tuple[Registry, Descriptor]) -> None:
    registry, descriptor = case
    data = compose(registry, descriptor.worker, descriptor.request, facts={}, names={}, worker_only=True)
    of_worker = worker_digest(registry, descriptor.worker)
    record = verify(data, of_worker, worker_only=True)
    assert isinstance(record, Record)
    assert (record.descriptor.worker, record.descriptor.request) == (descriptor.worker, {})
    assert record.text == key_text(of_worker)


@given(strategies.cases(min_size=1), st.data())
def test_a_record_under_another_name_is_forged(case: tuple[Registry, Descriptor], data: st.DataObject) -> None:
    registry, descriptor = case
    other = data.draw(strategies.descriptors(registry))
    written = compose(registry, descriptor.worker, descriptor.request, facts={}, names={})
    found = verify(written, digest(registry, other), worker_only=False)
    if other == descriptor:
        assert isinstance(found, Record)
    else:
        assert isinstance(found, str)
        assert "encodes to" in found


@given(strategies.cases(), st.data())
def test_no_broken_record_counts(case: tuple[Registry, Descriptor], data: st.DataObject) -> None:
    registry, descriptor = case
    written = compose(registry, descriptor.worker, descriptor.request, facts={"a": "b"}, names={})
    cut = data.draw(st.integers(0, len(written) - 3))
    assert isinstance(verify(written[:cut], digest(registry, descriptor), worker_only=False), str)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_refused_without_an_error(data: bytes) -> None:
    assert isinstance(verify(data, bytes(32), worker_only=False), str)
    assert isinstance(verify(data, bytes(32), worker_only=True), str)


def test_what_is_too_large_or_too_deep_is_refused() -> None:
    assert isinstance(verify(b" " * (MAX_RECORD_BYTES + 1), bytes(32), worker_only=False), str)
    assert isinstance(verify(b"[" * 100_000, bytes(32), worker_only=False), str)


@pytest.mark.parametrize(
    "notes", [None, [], "x", {"facts": 1, "names": [1]}, {"facts": {"a": 1}, "names": {"b": None}}]
)
def test_what_the_writer_says_of_itself_may_be_anything(notes: Any) -> None:
    registry = Registry()
    document = json.loads(compose(registry, {}, {}, facts={}, names={}))
    record = verify(
        json.dumps(document | {"record": notes}).encode(), digest(registry, Descriptor({}, {})), worker_only=False
    )
    assert isinstance(record, Record)
    assert (record.facts, record.names) == ({}, {})


@given(st.binary(min_size=32, max_size=32))
def test_both_texts_of_a_digest_lead_to_one_name(raw: bytes) -> None:
    long, short = key_text(raw), key_text(raw, DigestBits.SHORT)
    assert digest_prefix(long) == raw
    assert digest_prefix(short) == raw[:16]
    assert record_name(raw) == record_name(raw[:16]) == short


@given(st.text(alphabet="AB-_9z=/+@", min_size=20, max_size=45))
def test_no_other_text_is_a_digest_s(text: str) -> None:
    found = digest_prefix(text)
    assert found is None or text in {key_text(found.ljust(32, b"\0"), DigestBits(len(found) * 8))}
