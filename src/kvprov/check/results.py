"""What a check found, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvprov.check.compare import Difference
from kvprov.check.verdicts import Finding, Verdict, overall
from kvprov.contract.dimension import Dimension

FINE: Final = 0
OMITTED: Final = 1
CANNOT_JUDGE: Final = 4

VALUES: Final = "two values"
ELSEWHERE: Final = "same content at another path"
RENAMED: Final = "same content under another name"
IN_PLACE: Final = "other content at the same path"
PROCESS: Final = "same request in another process"
REPEATED: Final = "same request again"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two configurations that were compared.

    Attributes:
        a: What the writer has, in words.
        b: What the reader has.
        how: In which way they differ, one of the words above.
        verdict: What is said of them.
        same_key: Whether their keys are equal.
        difference: How the state differs; None where it was not looked at, since sharing is not allowed or the
            content is the same.
        share_allowed: What the oracle says, of permission dimensions.
    """

    a: str
    b: str
    how: str
    verdict: Verdict
    same_key: bool
    difference: Difference | None = None
    share_allowed: bool | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """Many keys at once, in search of two that are equal. Only keys are looked at, unless two are.

    Attributes:
        what: What was tried.
        keys: How many keys.
        equal: How many pairs of these were equal that must not be.
    """

    what: str
    keys: int
    equal: int


@dataclass(frozen=True, slots=True)
class Judged:
    """One dimension.

    Attributes:
        dimension: The registry's entry.
        withheld: Whether it was left out of the key on purpose.
        pairs: What was compared.
        trials: What else was tried.
        findings: What is wrong.
        note: Why it is not tested, where it is not.
    """

    dimension: Dimension
    withheld: bool = False
    pairs: tuple[Pair, ...] = ()
    trials: tuple[Trial, ...] = ()
    findings: tuple[Finding, ...] = ()
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst of its pairs and findings."""
        return overall([*(pair.verdict for pair in self.pairs), *(finding.verdict for finding in self.findings)])

    @property
    def worst(self) -> Pair | None:
        """The pair of two values whose state differs most; None where state was not compared."""
        compared = [pair for pair in self.pairs if pair.difference is not None and pair.how == VALUES]

        def by(pair: Pair) -> tuple[bool, float]:
            assert pair.difference is not None
            return pair.difference.largest is not None, pair.difference.largest or 0.0

        return max(compared, key=by, default=None)


@dataclass(frozen=True, slots=True)
class Control:
    """The positive control: one configuration, twice.

    Attributes:
        state: Whether two runs gave the same bytes.
        key: Whether they have one key.
        process: Whether another process derives that key, too; None where it was not asked.
        note: Why another process was not asked.
    """

    state: bool
    key: bool
    process: bool | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the check can judge."""
        return self.state and self.key


@dataclass(frozen=True, slots=True)
class Report:
    """What a check of one key function found.

    Attributes:
        model: The checkpoint, as it was named.
        tokens: Tokens of the prompt.
        layers: Layers of the model.
        key: Name of the key function.
        withheld: Dimensions left out of the binding on purpose.
        control: The positive control.
        dimensions: Every registered dimension, tested or not.
        findings: What is wrong with all dimensions alike.
        left_out: With `--leave-one-out`: the verdicts of each dimension, by the one that was left out.
        seconds: How long it took.
        versions: Versions of what it ran on.
    """

    model: str
    tokens: int
    layers: int
    key: str
    withheld: tuple[str, ...]
    control: Control
    dimensions: tuple[Judged, ...]
    findings: tuple[Finding, ...] = ()
    left_out: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Judged:
        """Return what was found of one dimension, by its name."""
        return next(judged for judged in self.dimensions if judged.dimension.name == name)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each dimension."""
        return {judged.dimension.name: judged.verdict for judged in self.dimensions}

    def having(self, verdict: Verdict) -> tuple[str, ...]:
        """Return the names of the dimensions of one verdict."""
        return tuple(name for name, found in self.verdicts.items() if found is verdict)

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Everything that is wrong: of all dimensions alike, then of each."""
        return self.findings + tuple(finding for judged in self.dimensions for finding in judged.findings)

    @property
    def unexpected(self) -> dict[str, tuple[str, ...]]:
        """The dimensions whose leaving out did not reopen exactly themselves, with those that it reopened."""
        found = {}
        for name, verdicts in self.left_out.items():
            reopened = tuple(other for other, verdict in verdicts.items() if verdict is Verdict.OMISSION)
            if reopened != (name,):
                found[name] = reopened
        return found

    @property
    def exit_code(self) -> int:
        """What the command exits with: 4 when it cannot judge, 1 on an omission, else 0.

        With `--leave-one-out`, also 1 when leaving out a dimension did not reopen exactly that one.
        """
        if not self.control.passed:
            return CANNOT_JUDGE
        return OMITTED if self.having(Verdict.OMISSION) or self.unexpected else FINE

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON can hold it. An infinite difference is the text `Infinity`."""
        return {
            "model": self.model,
            "tokens": self.tokens,
            "layers": self.layers,
            "key": self.key,
            "withheld": list(self.withheld),
            "judged": self.control.passed,
            "exit_code": self.exit_code,
            "control": {
                "state": self.control.state,
                "key": self.control.key,
                "process": self.control.process,
                "note": self.control.note,
            },
            "verdicts": self.verdicts,
            "dimensions": [_judged(judged) for judged in self.dimensions],
            "findings": [_finding(finding) for finding in self.all_findings],
            "left_out": {name: dict(verdicts) for name, verdicts in self.left_out.items()},
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
        }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "dimension": finding.dimension,
        "verdict": finding.verdict,
        "fault": finding.fault,
        "message": finding.message,
    }


def _judged(judged: Judged) -> dict[str, Any]:
    return {
        "name": judged.dimension.name,
        "half": judged.dimension.half,
        "kind": judged.dimension.kind,
        "verdict": judged.verdict,
        "withheld": judged.withheld,
        "note": judged.note,
        "pairs": [_pair(pair) for pair in judged.pairs],
        "trials": [{"what": trial.what, "keys": trial.keys, "equal": trial.equal} for trial in judged.trials],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "a": pair.a,
        "b": pair.b,
        "how": pair.how,
        "verdict": pair.verdict,
        "same_key": pair.same_key,
        "share_allowed": pair.share_allowed,
        "state": None if pair.difference is None else _difference(pair.difference),
    }


def _number(value: float | None) -> float | str | None:
    return "Infinity" if value is not None and math.isinf(value) else value


def _difference(difference: Difference) -> dict[str, Any]:
    place = difference.place
    return {
        "equal": difference.equal,
        "readable": difference.readable,
        "largest": _number(difference.largest),
        "layer": None if place is None else place.layer,
        "head": None if place is None else place.head,
        "token": None if place is None else place.token,
        "part": None if place is None else place.part,
        "tokens_affected": difference.tokens,
        "largest_by_layer": [_number(value) for value in difference.layers],
    }
