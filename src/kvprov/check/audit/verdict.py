"""What the audit says of one connector and one dimension."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.StrEnum):
    """How keys depend on a dimension."""

    BOUND = "bound"
    """They change with it, at full strength."""
    OMITTED = "omitted"
    """They do not change, or not with all of it."""
    CARRIED = "carried"
    """They change with a name, a path or a handle that stands for it, and not with the thing itself."""
    TRUNCATED = "truncated"
    """They change with it, but less than 128 bits of it enter."""
    NOT_APPLICABLE = "not applicable"
    """The path has no place for it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one fact.

    Attributes:
        changes: Whether every entry's key changes with it; None where the path has no place for it.
        bits: How many bits of it enter at most; None where nothing narrower than the fact itself was seen.
        samples: How many values were tried beside the base.
        carrier: See `Fact.carrier`.
    """

    changes: bool | None
    bits: int | None = None
    samples: int = 0
    carrier: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON could hold it."""
        return {"changes": self.changes, "bits": self.bits, "samples": self.samples, "carrier": self.carrier}


STRONG_BITS = 128
"""What a key must hold of a dimension at least (C8)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One connector and one dimension.

    Attributes:
        verdict: The weakest of what was seen.
        carriers: What keys hold in place of the fact, or beside it: `name`, `path`, `handle`.
        bits: How many bits of it enter, for `TRUNCATED`; of the carrier, for `CARRIED`.
        omitted: The facts of the dimension that keys do not change with.
        facts: What was seen of each fact, by name.
    """

    verdict: Verdict
    carriers: tuple[str, ...] = ()
    bits: int | None = None
    omitted: tuple[str, ...] = ()
    facts: Mapping[str, Seen] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The cell in words."""
        carriers = " and ".join(self.carriers)
        if self.verdict is Verdict.CARRIED:
            weak = self.bits is not None and self.bits < STRONG_BITS
            return f"by {carriers} only" + (f" ({self.bits} bits)" if weak else "")
        if self.verdict is Verdict.TRUNCATED:
            return f"truncated to {self.bits} bits"
        if self.verdict is Verdict.OMITTED and len(self.omitted) < len(self.own_facts):
            return f"omitted: {', '.join(self.omitted)}"
        return self.verdict.value

    @property
    def own_facts(self) -> tuple[str, ...]:
        """The facts that say something of state or permission, where the path has a place for them."""
        return tuple(name for name, seen in self.facts.items() if not seen.carrier and seen.changes is not None)

    @property
    def sound(self) -> bool:
        """Whether no two different values of the dimension can meet in one key, as far as was seen."""
        return self.verdict in (Verdict.BOUND, Verdict.NOT_APPLICABLE)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON could hold it."""
        return {
            "verdict": self.verdict.value,
            "text": self.text,
            "carriers": list(self.carriers),
            "bits": self.bits,
            "omitted": list(self.omitted),
            "facts": {name: seen.to_json() for name, seen in self.facts.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """Return the cell that `to_json` wrote."""
        return cls(
            Verdict(data["verdict"]),
            tuple(data["carriers"]),
            data["bits"],
            tuple(data["omitted"]),
            {name: Seen(**seen) for name, seen in data["facts"].items()},
        )


def judge(facts: Mapping[str, Seen]) -> Cell:
    """Return the verdict on what was seen of one dimension's facts."""
    own = {name: seen for name, seen in facts.items() if not seen.carrier and seen.changes is not None}
    carrying = {name: seen for name, seen in facts.items() if seen.carrier and seen.changes}
    carriers = {seen.carrier for seen in carrying.values()}
    # A path's last part is a part of the path: where the folders above it count, the path does.
    if "path" in carriers and _parts_of_a_path(carrying):
        carriers.discard("name")
    shown = tuple(sorted(carriers))
    if not own:
        return Cell(Verdict.NOT_APPLICABLE, facts=facts)
    omitted = tuple(name for name, seen in own.items() if not seen.changes)
    if omitted and carriers:
        widths = [seen.bits for seen in carrying.values() if seen.bits is not None and seen.carrier in carriers]
        return Cell(Verdict.CARRIED, shown, min(widths, default=None), omitted, facts)
    if omitted:
        return Cell(Verdict.OMITTED, shown, None, omitted, facts)
    bits = min((seen.bits for seen in own.values() if seen.bits is not None), default=None)
    weak = bits is not None and bits < STRONG_BITS
    return Cell(Verdict.TRUNCATED if weak else Verdict.BOUND, shown, bits if weak else None, (), facts)


def _parts_of_a_path(carrying: Mapping[str, Seen]) -> bool:
    """Whether the names among `carrying` are parts of a path, and nothing else that is called a name."""
    return {name for name, seen in carrying.items() if seen.carrier == "name"} <= {"last part of the path"}
