"""Changes one fact at a time and looks whether keys change."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from kvprov.check.audit.report import Row
from kvprov.check.audit.scenario import BASE, DIMENSIONS, FACTS, Fact, Scenario, without
from kvprov.check.audit.subject import AuditError, Budget, KeyFunction, NotApplicableError, Subject
from kvprov.check.audit.verdict import Cell, Seen, judge
from kvprov.check.audit.width import effective_bits


class _Keys:
    """The keys of scenarios, by one key function, with the base's made once."""

    def __init__(self, subject: str, function: KeyFunction) -> None:
        self._subject = subject
        self._function = function
        self.base_scenario = self._base()
        self.base = self.of(self.base_scenario)
        self._check()

    def _base(self) -> Scenario:
        """Return the base, less what this path has no place for."""
        scenario = BASE
        while True:
            try:
                self.of(scenario)
            except NotApplicableError as error:
                less = without(scenario, error.dimension)
                if less == scenario:
                    raise self._cannot(f"it has no place for {error.dimension}, which every worker has") from error
                scenario = less
            else:
                return scenario

    def of(self, scenario: Scenario) -> tuple[bytes, ...]:
        try:
            keys = tuple(self._function(scenario))
        except NotApplicableError:
            raise
        except Exception as error:
            # Code of an engine, driven outside of it: whatever it raises says that it could not be judged.
            raise self._cannot(f"its key code failed: {type(error).__name__}: {error}") from error
        if not keys or not all(isinstance(key, bytes) and key for key in keys):
            raise self._cannot("its key code made no key")
        return keys

    def _check(self) -> None:
        """Control, before any verdict: equal scenarios have equal keys, and other tokens have others."""
        if self.of(self.base_scenario) != self.base:
            raise self._cannot("it gives two keys to equal scenarios")
        others = self.of(replace(self.base_scenario, prompt=1))
        if len(others) != len(self.base) or any(a == b for a, b in zip(self.base, others, strict=True)):
            raise self._cannot("it gives one key to other tokens")

    def _cannot(self, why: str) -> AuditError:
        return AuditError(
            f"{self._subject} cannot be judged: {why}.",
            "Look into its driver in kvprov.check.audit, which may not fit this release of the engine.",
        )


def _see(keys: _Keys, fact: Fact, budget: Budget) -> Seen:
    """Return what keys hold of one fact."""
    count = min(fact.values or budget.samples, budget.samples)
    found: list[tuple[bytes, ...]] = []
    entries = range(len(keys.base))
    start = time.monotonic()
    for index in range(count):
        if index >= budget.few and (
            time.monotonic() - start > budget.seconds
            # What has not changed once does not enter; nothing is to be measured.
            or any(all(sample[entry] == keys.base[entry] for sample in found) for entry in entries)
        ):
            break
        scenario = fact.vary(keys.base_scenario, index)
        if scenario == keys.base_scenario:
            return Seen(None, carrier=fact.carrier)
        try:
            sample = keys.of(scenario)
        except NotApplicableError:
            return Seen(None, carrier=fact.carrier)
        if len(sample) != len(keys.base):
            raise AuditError(
                f"Another value of {fact.dimension} ({fact.name}) gives another number of keys.",
                "Report this: such keys cannot be compared.",
            )
        found.append(sample)
    columns = [[keys.base[entry], *(sample[entry] for sample in found)] for entry in entries]
    changes = all(any(key != column[0] for key in column[1:]) for column in columns)
    widths = [bits for column in columns if (bits := effective_bits(column)) is not None] if changes else []
    return Seen(changes, min(widths, default=None), len(found), fact.carrier)


def _cell(keys: _Keys, dimension: str, budget: Budget) -> Cell:
    return judge({fact.name: _see(keys, fact, budget) for fact in FACTS if fact.dimension == dimension})


def audit_dimension(function: KeyFunction, dimension: str, budget: Budget = Budget(), name: str = "it") -> Cell:  # noqa: B008
    """Return what the keys that `function` makes hold of one dimension.

    Raises:
        AuditError: It cannot be judged.
    """
    return _cell(_Keys(name, function), dimension, budget)


def cells(name: str, function: KeyFunction, budget: Budget) -> dict[str, Cell]:
    """Return what the keys that `function` makes hold of each dimension.

    Raises:
        AuditError: It cannot be judged.
    """
    keys = _Keys(name, function)
    return {dimension: _cell(keys, dimension, budget) for dimension in DIMENSIONS}


def audit(subjects: Iterable[Subject], *, native: bool = True, bound: bool = True) -> list[Row]:
    """Audit connectors by their key code.

    Args:
        subjects: What is audited.
        native: Whether to run the engine's own key code. It must run before kvprov is in effect in this process.
        bound: Whether to run it with kvprov in effect.

    Returns:
        A row for each. One that cannot be judged says why in it.
    """
    rows = []
    for subject in subjects:
        row = Row(subject.name, subject.connector, note=subject.note, unbound="" if subject.bound else subject.unbound)
        try:
            if native:
                row = replace(row, native=cells(subject.name, subject.native, subject.budget))
            if bound and subject.bound is not None:
                row = replace(row, bound=cells(f"{subject.name}, bound,", subject.bound, subject.budget))
        except AuditError as error:
            row = replace(row, error=error.message)
        rows.append(row)
    return rows
