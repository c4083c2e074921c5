"""The audit's result: rows of engines, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvprov.check.audit.verdict import Cell


@dataclass(frozen=True, slots=True)
class Row:
    """One connector, or one of its tiers.

    Attributes:
        name: As reports show it.
        connector: The engine's name for the connector.
        native: What its own keys hold, by dimension; None when that was not run.
        bound: What bound keys hold; None when kvprov does not bind it or it was not run.
        unbound: Why kvprov does not bind it; empty when it does.
        note: What a reader should know of it.
        error: Why it could not be judged; empty when it could.
    """

    name: str
    connector: str
    native: Mapping[str, Cell] | None = None
    bound: Mapping[str, Cell] | None = None
    unbound: str = ""
    note: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON could hold it."""
        found = {"name": self.name, "connector": self.connector, "unbound": self.unbound, "note": self.note}
        return {**found, "error": self.error, "native": _cells(self.native), "bound": _cells(self.bound)}

    def with_bound(self, other: Row) -> Row:
        """Return this row with what `other`, of the same subject, found with kvprov in effect."""
        return replace(self, bound=other.bound, error=self.error or other.error)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Return the row that `to_json` wrote."""
        read = {name: _read(data[name]) for name in ("native", "bound")}
        return cls(**{**data, **read})


def _cells(cells: Mapping[str, Cell] | None) -> dict[str, Any] | None:
    return None if cells is None else {name: cell.to_json() for name, cell in cells.items()}


def _read(cells: Mapping[str, Any] | None) -> dict[str, Cell] | None:
    return None if cells is None else {name: Cell.from_json(cell) for name, cell in cells.items()}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the audit found in one engine.

    Attributes:
        engine: `vllm` or `sglang`.
        versions: Of the engine and of the tiers that were audited with it, by package.
        rows: One for each connector or tier that has a driver.
        refused: Connectors that have no driver, with the reason: kvprov refuses them, which was tried, too.
        unknown: Connectors and tiers that the audit does not know. They fail it.
        skipped: Connectors and tiers that are known and whose packages are not installed.
        problem: Why the engine could not be asked at all; empty when it could.
    """

    engine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON could hold it."""
        return {**_members(self), "rows": [row.to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineReport:
        """Return the report that `to_json` wrote."""
        rows = tuple(Row.from_json(row) for row in data["rows"])
        return cls(**{**data, "rows": rows, "unknown": tuple(data["unknown"])})


def _members(report: EngineReport) -> dict[str, Any]:
    """Return a report's members other than its rows, as JSON could hold them."""
    return {
        "engine": report.engine,
        "versions": dict(report.versions),
        "refused": dict(report.refused),
        "unknown": list(report.unknown),
        "skipped": dict(report.skipped),
        "problem": report.problem,
    }


@dataclass(frozen=True, slots=True)
class Report:
    """The whole audit.

    Attributes:
        engines: The engines that were asked.
        missing: Engines that are not installed.
    """

    engines: tuple[EngineReport, ...]
    missing: tuple[str, ...] = ()

    @property
    def findings(self) -> list[str]:
        """What makes the audit fail: what it does not know, and what binding leaves out."""
        found = []
        for engine in self.engines:
            found += [f"{engine.engine}: {name} is not known to the audit" for name in engine.unknown]
            for row in engine.rows:
                found += [
                    f"{engine.engine}: {row.name}, bound: {dimension} is {cell.text}"
                    for dimension, cell in (row.bound or {}).items()
                    if not cell.sound
                ]
        return found

    @property
    def failures(self) -> list[str]:
        """What could not be judged."""
        found = [f"{engine.engine}: {engine.problem}" for engine in self.engines if engine.problem]
        return found + [f"{engine.engine}: {row.error}" for engine in self.engines for row in engine.rows if row.error]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON could hold it."""
        return {
            "engines": [engine.to_json() for engine in self.engines],
            "missing": list(self.missing),
            "findings": self.findings,
            "failures": self.failures,
        }
