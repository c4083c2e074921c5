"""A store of the demo, and who wrote which of its entries."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: who wrote it, and how many tokens' state it holds."""

    writer: str
    tokens: int


def entry_tokens(folder: Path) -> int:
    """Return how many tokens an entry holds: the first axis of its tensors, from the header of one of its files."""
    path = min(folder.glob("*.safetensors"))
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return int(header["kv_cache"]["shape"][0])


@dataclass(slots=True)
class Store:
    """A folder of entries, each a folder, whose listing is taken after every process that used it.

    Attributes:
        folder: Where it is.
        entries: The entries so far, by name.
    """

    folder: Path
    entries: dict[str, Entry] = field(default_factory=dict)

    def note_written(self, writer: str) -> int:
        """Attribute the entries that are new since the last call to `writer`, and return how many they are."""
        new = {path.name: path for path in self.folder.iterdir() if path.name not in self.entries}
        self.entries.update({name: Entry(writer, entry_tokens(path)) for name, path in new.items()})
        return len(new)

    def tokens_by_writer(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Return how many tokens the named entries hold, or all of them, by who wrote them."""
        counts: Counter[str] = Counter()
        for name in self.entries if names is None else names:
            counts[self.entries[name].writer] += self.entries[name].tokens
        return dict(sorted(counts.items()))
