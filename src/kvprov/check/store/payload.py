"""The bytes of two entries under one key, compared piece by piece: no entry is held in memory as a whole."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvprov.check.store.formats import HEADED, SAFETENSORS, Entry
from kvprov.check.store.numbers import WIDTHS, difference, element_type
from kvprov.errors import UnreadableContentError
from kvprov.identity.files import OpenFile
from kvprov.identity.safetensors import read_header

PIECE: Final = 1 << 20
"""Bytes that are compared at a time: a multiple of every element's width."""

MAX_HEADER_BYTES: Final = 1 << 20
MAX_GROUPS: Final = 16

_LMCACHE_TYPES: Final = {
    1: "float16",
    2: "float16",
    3: "bfloat16",
    4: "float32",
    5: "float64",
    6: "uint8",
    7: "fp8_e4m3",
    8: "fp8_e5m2",
}
"""LMCache's numbers of element types (`lmcache/v1/protocol.py`); 0 is none."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of elements in a file.

    Attributes:
        name: The tensor's name; empty where there are no names.
        form: What must agree for the elements to be comparable: their type and, where it is known, the shape.
        dtype: One of `WIDTHS`, or None.
        start: The offset of its first byte.
        end: The offset after its last one.
    """

    name: str
    form: str
    dtype: str | None
    start: int
    end: int


class Verdict(enum.StrEnum):
    """What comparing two entries came to."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comparing two entries came to.

    Attributes:
        verdict: Whether their bytes differ.
        reason: What differs in form, or why it cannot be told; empty otherwise.
        dtype: The type of the elements, or None where it is not known.
        largest: The largest absolute difference between elements, or None where it is not known.
        where: The tensor that holds it; empty where tensors have no names.
        elements: How many elements differ, or None where it is not known.
    """

    verdict: Verdict
    reason: str = ""
    dtype: str | None = None
    largest: float | None = None
    where: str = ""
    elements: int | None = None


def parts_of(file: OpenFile, entry: Entry, dtype: str | None) -> tuple[Part, ...]:
    """Return the runs of elements in an entry.

    Args:
        file: The entry.
        entry: What it is.
        dtype: The element type of raw entries, where it is known from elsewhere.

    Raises:
        UnreadableContentError: It is cut off, or not what its name says.
    """
    size = file.stamp.size
    if not size:
        raise UnreadableContentError(file.path, "it is empty", "")
    if entry.format.payload == SAFETENSORS:
        return tuple(
            Part(span.name, f"{span.dtype} {list(span.shape)}", element_type(span.dtype), span.start, span.end)
            for span in sorted(read_header(file, MAX_HEADER_BYTES), key=lambda span: span.name)
        )
    if entry.format.payload == HEADED:
        headed = _headed(file)
        if headed is not None:
            return headed
    known = element_type(dtype or entry.dtype)
    if known is not None and size % WIDTHS[known]:
        raise UnreadableContentError(file.path, f"its {size} bytes are no whole number of {known} elements", "")
    return (Part("", known or "", known, 0, size),)


def _headed(file: OpenFile) -> tuple[Part, ...] | None:
    """Return the elements behind LMCache's header, or None where there is no such header."""
    size = file.stamp.size
    head = file.read(0, min(size, 8 + 20 * MAX_GROUPS))
    if len(head) < 28:
        return None
    (length,) = struct.unpack_from("<i", head)
    for groups in range(1, MAX_GROUPS + 1):
        start = 8 + 20 * groups
        if len(head) < start:
            return None
        fields = [struct.unpack_from("<5i", head, 8 + 20 * group) for group in range(groups)]
        types = [_LMCACHE_TYPES.get(kind) for kind, *_ in fields]
        counts = [_count(dims) * WIDTHS.get(dtype or "", 0) for (_, *dims), dtype in zip(fields, types, strict=True)]
        if None not in types and sum(counts) == length > 0:
            if start + length != size:
                raise UnreadableContentError(
                    file.path, f"its header promises {length} bytes, and {size - start} are there", ""
                )
            parts, at = [], start
            for group, (dtype, count, (_, *dims)) in enumerate(zip(types, counts, fields, strict=True)):
                parts.append(Part(str(group) if groups > 1 else "", f"{dtype} {dims}", dtype, at, at + count))
                at += count
            return tuple(parts)
        if start + length == size and types[0] is None:
            # Bytes of a serializer (cachegen): their length stands in the header, and nothing of their meaning.
            return (Part("", "serialized", None, start, size),)
    return None


def _count(dims: list[int]) -> int:
    count = 1
    for dim in dims:
        # LMCache pads shapes of fewer axes with zeros.
        count *= max(dim, 1)
    return count


def compare(first: OpenFile, second: OpenFile, entry: Entry, dtype: str | None) -> Outcome:
    """Compare two entries of one key.

    Args:
        first: The entry of one store.
        second: That of the other.
        entry: What they are.
        dtype: The element type of raw entries, where it is known from elsewhere.

    Raises:
        UnreadableContentError: One of them cannot be read, or is cut off.
        ChangedContentError: One of them was written to meanwhile.
    """
    ours, theirs = parts_of(first, entry, dtype), parts_of(second, entry, dtype)
    forms = [[(part.name, part.form, part.end - part.start) for part in parts] for parts in (ours, theirs)]
    if forms[0] != forms[1]:
        outcome = _of_two_forms(first, second, entry, ours, theirs)
    else:
        outcome = _piecewise(first, second, ours, theirs)
    first.recheck()
    second.recheck()
    return outcome


def _of_two_forms(
    first: OpenFile, second: OpenFile, entry: Entry, ours: tuple[Part, ...], theirs: tuple[Part, ...]
) -> Outcome:
    sizes = first.stamp.size, second.stamp.size
    if sizes[0] != sizes[1] and entry.format.payload != SAFETENSORS:
        shorter = min(sizes)
        if all(one == other for one, other in _pieces(first, second, 0, 0, shorter)):
            which = "first" if sizes[0] < sizes[1] else "second"
            return Outcome(
                Verdict.UNDECIDED,
                f"the {which} store's entry is the beginning of the other's ({sizes[0]} and {sizes[1]} bytes): cut off",
            )
        return Outcome(Verdict.DIFFERENT, f"{sizes[0]} and {sizes[1]} bytes", ours[0].dtype)
    by_name = {part.name: part for part in theirs}
    for part in ours:
        other = by_name.get(part.name)
        if other is None or other.form != part.form:
            what = f"{part.form} and {other.form}" if other is not None else f"{part.name!r:.80} is in the first alone"
            return Outcome(Verdict.DIFFERENT, f"of two forms: {what}")
    return Outcome(Verdict.DIFFERENT, "of two forms: the second holds more")


def _pieces(first: OpenFile, second: OpenFile, at: int, other: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    for offset in range(0, size, PIECE):
        length = min(PIECE, size - offset)
        yield first.read(at + offset, length), second.read(other + offset, length)


def _piecewise(first: OpenFile, second: OpenFile, ours: tuple[Part, ...], theirs: tuple[Part, ...]) -> Outcome:
    equal, known, largest, elements, where = True, True, 0.0, 0, ""
    for part, other in zip(ours, theirs, strict=True):
        for one, two in _pieces(first, second, part.start, other.start, part.end - part.start):
            if one == two:
                continue
            equal = False
            apart = None if part.dtype is None else difference(one, two, part.dtype)
            if apart is None:
                known = False
                continue
            elements += apart[1]
            if apart[0] >= largest:
                largest, where = apart[0], part.name
    types = {part.dtype for part in ours}
    dtype = types.pop() if len(types) == 1 else None
    if equal:
        return Outcome(Verdict.EQUAL, dtype=dtype, largest=0.0, elements=0)
    if not known:
        return Outcome(Verdict.DIFFERENT, dtype=dtype)
    return Outcome(Verdict.DIFFERENT, dtype=dtype, largest=largest, where=where, elements=elements)
