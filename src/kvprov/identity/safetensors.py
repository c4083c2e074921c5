"""The header of a safetensors file, read as strictly as the safetensors library reads it, or more.

Source: https://github.com/huggingface/safetensors (format, and `Metadata::validate`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

from kvprov.errors import UnreadableContentError
from kvprov.identity.files import OpenFile

MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors library's own limit."""

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, for each dtype that safetensors 0.8 names."""

_LENGTH_BYTES: Final = 8
_MAX_U64: Final = 2**64 - 1
_MAX_ENTRY_CHARS: Final = 4096
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_ADVICE: Final = "Fetch the file again from its source, or have it written anew by the safetensors library."


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor lies in a file.

    Attributes:
        name: As the header gives it.
        dtype: One of `DTYPE_BITS`.
        shape: Elements along each axis.
        start: Its first byte's offset in the file.
        end: The offset after its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Members:
    """The members of the header's one object, one at a time.

    A JSON parser would first build whatever the header holds: 100 MB of `[],[],...` become gigabytes of lists.
    Here every value is bounded before it is parsed, so that memory stays in proportion to the header.
    """

    def __init__(self, text: str, fail: Callable[[str], NoReturn]) -> None:
        self._text = text
        self._at = 0
        self._fail = fail
        self._decoder = json.JSONDecoder(object_pairs_hook=self._no_doubles)

    def _no_doubles(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len({key for key, _ in pairs}) != len(pairs):
            self._fail("its header names a field twice in one tensor")
        return dict(pairs)

    def _peek(self) -> str:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _take(self, char: str) -> None:
        found = self._peek()
        if found != char:
            self._fail(
                f"its header is not valid JSON: {char!r} expected at character {self._at}, not {found or 'the end'!r}"
            )
        self._at += 1

    def _string(self) -> str:
        if self._peek() != '"':
            self._fail(f"its header is not valid JSON: a string expected at character {self._at}")
        try:
            value, self._at = self._decoder.raw_decode(self._text, self._at)
        except ValueError as error:
            self._fail(f"its header is not valid JSON: {error}")
        try:
            value.encode()
        except UnicodeEncodeError:
            self._fail(f"its header holds half a surrogate pair before character {self._at}")
        return str(value)

    def _object_of(self) -> Iterator[str]:
        """Yield each name of an object, standing at its value, which the caller must take."""
        self._take("{")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            name = self._string()
            self._take(":")
            self._peek()
            yield name
            if self._peek() != ",":
                break
            self._at += 1
        self._take("}")

    def _metadata(self) -> None:
        if self._peek() != "{":
            self._fail("its __metadata__ is not an object")
        seen = set()
        for key in self._object_of():
            if key in seen:
                self._fail(f"its __metadata__ names {key[:80]!r} twice")
            seen.add(key)
            if self._peek() != '"':
                self._fail(f"its __metadata__ holds something other than text at {key[:80]!r}")
            self._string()

    def _entry(self, name: str) -> dict[str, object]:
        # No field that a tensor may have holds a brace, so the first one closes the entry.
        end = self._text.find("}", self._at, self._at + _MAX_ENTRY_CHARS)
        if self._peek() != "{" or end < 0:
            self._fail(f"the entry of {name[:80]!r} is not a small object")
        try:
            value = self._decoder.decode(self._text[self._at : end + 1])
        except RecursionError:
            self._fail(f"the entry of {name[:80]!r} is nested too deeply")
        except ValueError as error:
            self._fail(f"the entry of {name[:80]!r} is not valid JSON: {error}")
        self._at = end + 1
        assert isinstance(value, dict)
        return value

    def tensors(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield each tensor's name and entry, checking everything around them."""
        seen = set()
        for name in self._object_of():
            if name in seen:
                self._fail(f"its header names {name[:80]!r} twice")
            seen.add(name)
            if name == "__metadata__":
                self._metadata()
            else:
                yield name, self._entry(name)
        if self._peek():
            self._fail(f"its header goes on after its object, at character {self._at}")


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    # `type`, not `isinstance`: JSON's true is no number.
    if isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_U64 for n in value):
        return tuple(value)
    return None


def _span(name: str, entry: dict[str, object], data: int, size: int, fail: Callable[[str], NoReturn]) -> TensorSpan:
    shown = repr(name[:80])
    if entry.keys() != _FIELDS:
        odd = sorted(_FIELDS.symmetric_difference(entry))[0]
        fail(f"the entry of {shown} {'lacks' if odd in _FIELDS else 'has the unknown field'} {odd[:80]!r}")
    dtype, shape, offsets = entry["dtype"], _whole_numbers(entry["shape"]), _whole_numbers(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fail(f"the dtype of {shown} is unknown: {str(dtype)[:80]!r}")
    if shape is None:
        fail(f"the shape of {shown} is not a list of whole numbers")
    if offsets is None or len(offsets) != 2:
        fail(f"the offsets of {shown} are not two whole numbers")
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
        # Checked at every axis: as in the library, a later zero does not excuse an overflow.
        if bits > _MAX_U64:
            fail(f"the shape of {shown} is too large")
    if bits % 8:
        fail(f"the elements of {shown} do not fill whole bytes")
    start, end = offsets
    if not start <= end <= size:
        fail(f"the data of {shown} lies outside the file (bytes {start} to {end} of {size})")
    if end - start != bits // 8:
        fail(f"{shown} has {end - start} bytes of data, but its dtype and shape need {bits // 8}")
    return TensorSpan(name, dtype, shape, data + start, data + end)


def read_header(file: OpenFile, limit: int = MAX_HEADER_BYTES) -> tuple[TensorSpan, ...]:
    """Return the tensors of a safetensors file, in the order of their data.

    The data of the tensors must cover the rest of the file exactly, without overlaps or holes, as the safetensors
    library requires. `__metadata__` must be a map of text and is otherwise ignored.

    Args:
        file: The file.
        limit: Most bytes that its header may have.

    Raises:
        UnreadableContentError: the file is not a whole and well-formed safetensors file.
        ChangedContentError: the file was truncated meanwhile.
    """

    def fail(reason: str) -> NoReturn:
        raise UnreadableContentError(file.path, reason, _ADVICE)

    file_size = file.stamp.size
    if file_size < _LENGTH_BYTES:
        fail(f"it has {file_size} bytes, too few for a safetensors header")
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    # Both checked before anything of that length is read.
    if length > limit:
        fail(f"its header claims {length} bytes, more than the limit of {limit}")
    if length > file_size - _LENGTH_BYTES:
        fail(f"its header claims {length} bytes, but the file has only {file_size}: it is truncated or no safetensors")
    raw = file.read(_LENGTH_BYTES, length)
    if raw[:1] != b"{":
        fail("its header does not start with '{': it is no safetensors file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"its header is not UTF-8 text (byte {error.start})")
    del raw
    data = _LENGTH_BYTES + length
    spans = [_span(name, entry, data, file_size - data, fail) for name, entry in _Members(text, fail).tensors()]
    spans.sort(key=lambda span: (span.start, span.end))
    at = data
    for span in spans:
        if span.start != at:
            what = "overlaps the tensor before it" if span.start < at else f"leaves {span.start - at} bytes before it"
            fail(f"the data of {span.name[:80]!r} {what}")
        at = span.end
    if at != file_size:
        fail(f"{file_size - at} bytes at its end belong to no tensor")
    return tuple(spans)
