"""Two stores, entry by entry."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvprov.check.store.entries import Store
from kvprov.check.store.formats import FORMATS, Entry, entry
from kvprov.check.store.numbers import WIDTHS, element_type, require_numpy
from kvprov.check.store.payload import Outcome, Verdict, compare
from kvprov.errors import ChangedContentError, StoreError, UnreadableContentError

LISTED: Final = 1000
"""Most keys of each kind that a report lists. All are counted."""

MAX_DESCRIPTION_BYTES: Final = 1 << 20
_MAX_DESCRIPTIONS: Final = 1024


@dataclass(frozen=True, slots=True)
class Found:
    """An entry under one key of both stores.

    Attributes:
        key: Its path within either store.
        format: The name of its format.
        outcome: What comparing the two came to.
    """

    key: str
    format: str
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a report has it. A difference that is infinite is the text `Infinity`: JSON has none."""
        largest = self.outcome.largest
        return {
            "key": self.key,
            "format": self.format,
            "reason": self.outcome.reason,
            "dtype": self.outcome.dtype,
            "largest_difference": _number(largest),
            "where": self.outcome.where,
            "elements": self.outcome.elements,
        }


def _number(value: float | None) -> float | str | None:
    return "Infinity" if value == float("inf") else value


class Listed:
    """How many entries there are of a kind, and the first of them by key.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int = LISTED) -> None:
        self.count = 0
        self._limit = limit
        self._kept: list[Found] = []

    def add(self, found: Found) -> None:
        """Add one."""
        self.count += 1
        self._kept.append(found)
        if len(self._kept) > 2 * self._limit:
            self._cut()

    def _cut(self) -> None:
        self._kept.sort(key=lambda found: found.key)
        del self._kept[self._limit :]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Found]:
        self._cut()
        return iter(self._kept)


@dataclass(slots=True)
class StoreDiff:
    """What comparing two stores came to. Entries are files: ExampleConnector has one for each layer of a key.

    Attributes:
        tolerance: Up to which difference entries are taken for equal, or None for bytes alone.
        formats: How many entries of each format are in either store, by name.
        equal: Entries of equal bytes under one key.
        within: Entries of one key whose bytes differ, by no more than the tolerance.
        only_first: Entries whose key the first store alone has.
        only_second: Entries whose key the second store alone has.
        others: Files of either store that are no entries.
        odd: Links, pipes and the like in either store. They were neither followed nor opened.
        collisions: Entries of one key that differ.
        undecided: Entries of one key that could not be compared: cut off, unreadable, or written to meanwhile.
    """

    tolerance: float | None = None
    formats: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    within: int = 0
    only_first: int = 0
    only_second: int = 0
    others: int = 0
    odd: int = 0
    collisions: Listed = field(default_factory=Listed)
    undecided: Listed = field(default_factory=Listed)

    @property
    def shared(self) -> int:
        """Entries whose key both stores have."""
        return self.equal + self.within + len(self.collisions) + len(self.undecided)

    @property
    def words(self) -> str:
        """The outcome, in a sentence."""
        if self.collisions:
            return f"{len(self.collisions)} of {self.shared} shared entries collide: one key, other bytes."
        if not self.shared:
            return "No key is in both stores, so there is nothing to collide."
        if self.undecided:
            return f"{len(self.undecided)} of {self.shared} shared entries could not be compared."
        return f"All {self.shared} shared entries are equal{' within the tolerance' if self.within else ''}."

    def to_json(self) -> dict[str, Any]:
        """Return the report; lists hold the first `LISTED` keys of each kind."""
        return {
            "words": self.words,
            "tolerance": self.tolerance,
            "formats": dict(sorted(self.formats.items())),
            "shared": self.shared,
            "equal": self.equal,
            "within_tolerance": self.within,
            "collisions": len(self.collisions),
            "undecided": len(self.undecided),
            "only_first": self.only_first,
            "only_second": self.only_second,
            "other_files": self.others,
            "odd_files": self.odd,
            "colliding": [found.to_json() for found in self.collisions],
            "not_compared": [found.to_json() for found in self.undecided],
        }


class _Descriptions:
    """The element types that JSON files beside entries name, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, str | None] = {}

    def dtype(self, path: str) -> str | None:
        if path not in self._read:
            if len(self._read) >= _MAX_DESCRIPTIONS:
                return None
            self._read[path] = self._load(path)
        return self._read[path]

    def _load(self, path: str) -> str | None:
        try:
            file = self._store.open(path)
            if file is None:
                return None
            with file:
                described = json.loads(file.read_all(MAX_DESCRIPTION_BYTES))
        except (OSError, UnreadableContentError, ChangedContentError, ValueError, RecursionError):
            # Then the type is not known, which shows in the report.
            return None
        dtype = described.get("dtype") if isinstance(described, dict) else None
        return element_type(dtype) if isinstance(dtype, str) else None


def diff_stores(
    first: str | Path,
    second: str | Path,
    *,
    only: str | None = None,
    tolerance: float | None = None,
    dtype: str | None = None,
    may_be_empty: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> StoreDiff:
    """Compare two stores. Memory does not grow with their size, but for the names of folders still to be listed.

    Args:
        first: The folder of one.
        second: That of the other; it may be a later snapshot of the first.
        only: The one format whose entries are looked for, a name of `FORMATS`; None for all.
        tolerance: The largest absolute difference up to which elements are taken for equal; None for equal bytes.
            Entries whose element type is not known are then still compared by bytes.
        dtype: The element type of entries that do not name theirs.
        may_be_empty: Whether stores without an entry are no error.
        progress: Called now and then with how many entries of the first store have been looked at.

    Raises:
        StoreError: A store cannot be read, an argument is unknown, or neither store holds an entry of a known format.
    """
    if only is not None and only not in FORMATS:
        raise StoreError(f"{only!r:.80} is no format.", f"Formats are: {', '.join(FORMATS)}.")
    if dtype is not None and element_type(dtype) is None:
        raise StoreError(f"{dtype!r:.80} is no element type that is known.", f"Types are: {', '.join(WIDTHS)}.")
    if tolerance is not None:
        if not tolerance >= 0:
            raise StoreError(f"A tolerance of {tolerance} is none.", "Give a number that is not negative.")
        require_numpy()
    with Store(first) as one, Store(second) as other:
        found = _Differ(one, other, only, tolerance, dtype).run(progress)
    if not found.formats and not may_be_empty:
        raise StoreError(
            "Neither store holds an entry of a known format.",
            f"Name the folders that the connector writes to. Formats are: {', '.join(FORMATS)}.",
        )
    return found


class _Differ:
    def __init__(
        self, first: Store, second: Store, only: str | None, tolerance: float | None, dtype: str | None
    ) -> None:
        self._first, self._second = first, second
        self._only = only
        self._dtype = element_type(dtype)
        self._described = _Descriptions(first)
        self._result = StoreDiff(tolerance)

    def run(self, progress: Callable[[int], object]) -> StoreDiff:
        result = self._result
        for number, item in enumerate(self._entries(self._first)):
            if number % 64 == 0:
                progress(number)
            self._compare(item)
        for item in self._entries(self._second):
            try:
                result.only_second += not self._first.has(item.path)
            except OSError as error:
                # In a folder that is a link in the first store, say.
                result.undecided.add(_undecided(item, f"the first store's cannot be looked at: {error.strerror}"))
        return result

    def _entries(self, store: Store) -> Iterator[Entry]:
        for path, regular in store.walk():
            if not regular:
                self._result.odd += 1
                continue
            found = entry(path, self._only)
            if found is None:
                self._result.others += 1
                continue
            self._result.formats[found.format.name] += 1
            yield found

    def _compare(self, item: Entry) -> None:
        result = self._result
        try:
            ours, theirs = self._first.open(item.path), self._second.open(item.path)
        except OSError as error:
            result.undecided.add(_undecided(item, f"it cannot be opened: {error.strerror}"))
            return
        except UnreadableContentError as error:
            result.undecided.add(_undecided(item, error.reason))
            return
        if ours is None or theirs is None:
            # None of the first store's: it was removed meanwhile, so it is nobody's.
            result.only_first += ours is not None
            for file in (ours, theirs):
                if file is not None:
                    file.close()
            return
        with ours, theirs:
            try:
                outcome = compare(ours, theirs, item, self._type_of(item))
            except (UnreadableContentError, ChangedContentError) as error:
                which = "first" if error.path == ours.path else "second"
                result.undecided.add(_undecided(item, f"the {which} store's: {error.reason}"))
                return
        self._count(item, outcome)

    def _count(self, item: Entry, outcome: Outcome) -> None:
        result = self._result
        if outcome.verdict is Verdict.EQUAL:
            result.equal += 1
        elif outcome.verdict is Verdict.UNDECIDED:
            result.undecided.add(Found(item.path, item.format.name, outcome))
        elif result.tolerance is not None and outcome.largest is not None and outcome.largest <= result.tolerance:
            result.within += 1
        else:
            result.collisions.add(Found(item.path, item.format.name, outcome))

    def _type_of(self, item: Entry) -> str | None:
        described = None if item.described is None else self._described.dtype(item.described)
        return described or self._dtype


def _undecided(item: Entry, reason: str) -> Found:
    return Found(item.path, item.format.name, Outcome(Verdict.UNDECIDED, reason))
