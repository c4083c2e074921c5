from __future__ import annotations

import json
import os
import resource
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprov.errors import UnreadableContentError
from kvprov.identity import open_file, read_header
from kvprov.identity.safetensors import DTYPE_BITS, TensorSpan
from tests.identity.support import WEIGHTS, packed, with_header


def header_of(path: Path, data: bytes) -> tuple[TensorSpan, ...]:
    path.write_bytes(data)
    with open_file(path) as file:
        return read_header(file)


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


FOUR = b"\1\2\3\4"


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    spans = header_of(path, packed(WEIGHTS, {"format": "pt"}))
    assert [span.name for span in spans] == list(WEIGHTS)
    raw = path.read_bytes()
    for span in spans:
        dtype, shape, data = WEIGHTS[span.name]
        assert (span.dtype, list(span.shape), raw[span.start : span.end]) == (dtype, shape, data)


GOOD = {
    "no tensors": with_header({}),
    "metadata only": with_header({"__metadata__": {"a": '}{[]"\\', "b": ""}}),
    "padded": with_header(b'{"a" : {"dtype":"U8","shape":[4],"data_offsets":[0,4]}\t\n}     ', FOUR),
    "escaped name": with_header(b'{"\\u0061\\ud83d\\ude00":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR),
    "name with braces": with_header({"}{": entry()}, FOUR),
    "scalar": with_header({"a": entry("F32", [])}, FOUR),
    "empty tensors": with_header(
        {"a": entry("F32", [0, 5], [0, 0]), "b": entry(), "c": entry("I8", [0], [4, 4])}, FOUR
    ),
    "listed backwards": with_header({"b": entry("U8", [2], [2, 4]), "a": entry("U8", [2], [0, 2])}, FOUR),
    "below a byte": with_header({"a": entry("F4", [2, 4])}, FOUR),
    "six bits": with_header({"a": entry("F6_E2M3", [4], [0, 3]), "b": entry("BOOL", [1], [3, 4])}, FOUR),
}


@pytest.mark.parametrize("name", GOOD)
def test_takes(tmp_path: Path, name: str) -> None:
    header_of(tmp_path / "f", GOOD[name])


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_takes_every_dtype(tmp_path: Path, dtype: str) -> None:
    (span,) = header_of(tmp_path / "f", packed({"a": (dtype, [8], b"\0" * DTYPE_BITS[dtype])}))
    assert span.dtype == dtype


BAD = {
    "empty": (b"", "too few"),
    "seven bytes": (b"\0" * 7, "too few"),
    "no header": (b"\0" * 8, "does not start with"),
    "pickle": (b"\x80\x04\x95\0\0\0\0\0\0\0\0", "claims"),
    "longer than the file": (
        with_header({"a": entry()}, FOUR, length=1000),
        "claims 1000 bytes, but the file has only",
    ),
    "two gigabytes": (with_header({}, length=2_000_000_000), "claims 2000000000 bytes, more than the limit"),
    "largest length": (b"\xff" * 8 + b"{}", "more than the limit"),
    "length eats data": (with_header({"a": entry()}, b"", length=0), "does not start with"),
    "leading space": (with_header(b" {}"), "does not start with"),
    "a list": (with_header(b"[]"), "does not start with"),
    "byte order mark": (with_header(b"\xef\xbb\xbf{}"), "does not start with"),
    "not utf-8": (with_header(b'{"\xff":1}'), "not UTF-8"),
    "utf-8 surrogate": (with_header(b'{"\xed\xa0\x80":1}'), "not UTF-8"),
    "half a pair": (with_header(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR), "surrogate"),
    "cut off": (with_header(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}', FOUR), "expected"),
    "cut off in a name": (with_header(b'{"a'), "not valid JSON"),
    "control character": (with_header(b'{"a\n":1}'), "not valid JSON"),
    "trailing comma": (
        with_header(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},}', FOUR),
        "a string expected",
    ),
    "no colon": (with_header(b'{"a"{}}'), "expected"),
    "goes on": (with_header(b"{}{}"), "goes on after"),
    "a number for a tensor": (with_header({"a": 1}), "not a small object"),
    "a deep list for a tensor": (with_header(b'{"a":' + b"[" * 100_000), "not a small object"),
    "a deep shape": (
        with_header(b'{"a":{"dtype":"U8","data_offsets":[0,4],"shape":' + b"[" * 2000 + b"]" * 2000 + b"}}", FOUR),
        "nested too deeply|not a list of whole numbers",
    ),
    "a deep object": (with_header(b'{"a":' * 100_000), "not a small object"),
    "a huge entry": (with_header({"a": entry(shape=[1] * 100_000)}, FOUR), "not a small object"),
    "metadata is a list": (with_header({"__metadata__": []}), "__metadata__ is not an object"),
    "metadata is null": (with_header({"__metadata__": None}), "__metadata__ is not an object"),
    "metadata of numbers": (with_header({"__metadata__": {"a": 1}}), "other than text"),
    "metadata of objects": (with_header({"__metadata__": {"a": {}}}), "other than text"),
    "metadata twice in a name": (with_header(b'{"__metadata__":{"a":"1","a":"2"}}'), "names 'a' twice"),
    "metadata twice": (with_header(b'{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "name twice": (
        with_header(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"\\u0061":{"dtype":"U8"}}', FOUR),
        "names 'a' twice",
    ),
    "field twice": (
        with_header(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', FOUR),
        "field twice",
    ),
    "field missing": (with_header({"a": {"dtype": "U8", "shape": [4]}}, FOUR), "lacks 'data_offsets'"),
    "field unknown": (with_header({"a": entry(scale=2)}, FOUR), "unknown field 'scale'"),
    "dtype unknown": (with_header({"a": entry("F7")}, FOUR), "dtype of 'a' is unknown"),
    "dtype a number": (with_header({"a": entry(8)}, FOUR), "dtype of 'a' is unknown"),
    "dtype in lower case": (with_header({"a": entry("u8")}, FOUR), "dtype of 'a' is unknown"),
    "shape negative": (with_header({"a": entry(shape=[-4])}, FOUR), "shape of 'a' is not"),
    "shape of two negatives": (with_header({"a": entry(shape=[-2, -2])}, FOUR), "shape of 'a' is not"),
    "shape a fraction": (with_header({"a": entry(shape=[4.0])}, FOUR), "shape of 'a' is not"),
    "shape a truth": (with_header({"a": entry("F32", [True])}, FOUR), "shape of 'a' is not"),
    "shape a number": (with_header({"a": entry(shape=4)}, FOUR), "shape of 'a' is not"),
    "shape not a number": (
        with_header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', FOUR),
        "shape of 'a'",
    ),
    "shape of 3900 digits": (
        with_header(b'{"a":{"dtype":"U8","shape":[' + b"9" * 3900 + b'],"data_offsets":[0,4]}}', FOUR),
        "shape of 'a' is not",
    ),
    "shape overflows": (with_header({"a": entry(shape=[2**32, 2**32])}, FOUR), "too large"),
    "shape overflows before a zero": (with_header({"a": entry("U8", [2**62, 4, 0], [0, 0])}), "too large"),
    "offsets three": (with_header({"a": entry(offsets=[0, 4, 4])}, FOUR), "not two whole numbers"),
    "offsets negative": (with_header({"a": entry(offsets=[-4, 0])}, FOUR), "not two whole numbers"),
    "offsets reversed": (with_header({"a": entry(offsets=[4, 0])}, FOUR), "outside the file"),
    "beyond the end": (with_header({"a": entry(shape=[8], offsets=[0, 8])}, FOUR), "outside the file"),
    "far beyond the end": (with_header({"a": entry(offsets=[2**63, 2**63 + 4])}, FOUR), "outside the file"),
    "too little data": (with_header({"a": entry("F32", [2])}, FOUR), "dtype and shape need 8"),
    "not whole bytes": (with_header({"a": entry("F4", [1], [0, 1])}, b"\0"), "whole bytes"),
    "truncated": (packed(WEIGHTS)[:-1], "outside the file"),
    "data after the end": (packed(WEIGHTS) + b"\0", "1 bytes at its end"),
    "data without tensors": (with_header({}, FOUR), "4 bytes at its end"),
    "overlap": (with_header({"a": entry(), "b": entry("U8", [4], [2, 6])}, FOUR + b"\0\0"), "overlaps"),
    "same data": (with_header({"a": entry(), "b": entry()}, FOUR), "overlaps"),
    "hole": (with_header({"a": entry("U8", [1], [0, 1]), "b": entry("U8", [2], [2, 4])}, FOUR), "leaves 1 bytes"),
    "hole at the start": (with_header({"a": entry("U8", [2], [2, 4])}, FOUR), "leaves 2 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    path = tmp_path / "bad.safetensors"
    header_of(path, packed(WEIGHTS))
    with pytest.raises(UnreadableContentError, match=reason) as caught:
        header_of(path, data)
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    assert caught.value.advice


@pytest.mark.parametrize("name", ["two gigabytes", "longer than the file", "a deep list for a tensor"])
def test_claims_cost_no_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(BAD[name][0])
    with open_file(path) as file:
        tracemalloc.start()
        with pytest.raises(UnreadableContentError):
            read_header(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_file_with_holes_of_a_terabyte_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes((99_000_000_000).to_bytes(8, "little") + b"{")
    os.truncate(path, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_file(path) as file, pytest.raises(UnreadableContentError, match="more than the limit"):
        read_header(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


def test_many_brackets_cost_no_more_than_the_header(tmp_path: Path) -> None:
    # json.loads makes 24 times as many bytes of lists of this.
    brackets = b"[]," * 2_000_000
    path = tmp_path / "bad"
    for inside in (b'{"__metadata__":{"a":[%s]}}', b'{"a":{"shape":[%s]}}', b'{"a":[%s]}'):
        path.write_bytes(with_header(inside % brackets))
        with open_file(path) as file:
            tracemalloc.start()
            with pytest.raises(UnreadableContentError):
                read_header(file)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 3 * len(brackets)


def test_a_tighter_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(packed(WEIGHTS))
    with open_file(path) as file:
        read_header(file, limit=1000)
        with pytest.raises(UnreadableContentError, match="more than the limit of 100"):
            read_header(file, limit=100)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_in_the_header_gives_one_clear_error_or_a_sound_header(
    tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(packed(WEIGHTS, {"format": "pt"}))
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end - 1))
        raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged"
    with suppress(UnreadableContentError):
        spans = header_of(path, bytes(raw))
        assert sum(span.end - span.start for span in spans) == len(raw) - end
        assert spans[-1].end == len(raw)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True, max_size=6),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    space=st.sampled_from([None, 1, "\t"]),
)
def test_agrees_with_a_json_parser(
    tmp_path: Path, names: list[str], metadata: dict[str, str], space: int | str | None
) -> None:
    names = [name for name in names if name != "__metadata__"]
    header: dict[str, object] = {name: entry("U8", [1], [i, i + 1]) for i, name in enumerate(names)}
    raw = json.dumps({"__metadata__": metadata} | header, indent=space, ensure_ascii=bool(space)).encode(
        "utf-8", "surrogatepass"
    )
    data = with_header(raw, bytes(len(names)))
    if any("\ud800" <= char <= "\udfff" for char in "".join(metadata) + "".join(metadata.values())):
        with pytest.raises(UnreadableContentError):
            header_of(tmp_path / "f", data)
    else:
        assert [span.name for span in header_of(tmp_path / "f", data)] == names
