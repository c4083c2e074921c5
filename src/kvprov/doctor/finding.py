"""Findings, and the sections that hold them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Level(enum.StrEnum):
    """How bad a finding is, the worst first."""

    UNSAFE = "unsafe"
    """Engines would share without regard to provenance, or a setting does not do what whoever set it believes."""
    FAILED = "failed"
    """It could not be looked at."""
    WARNING = "warning"
    """Protected, but weaker or slower than it could be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that somebody should know or do.

    Attributes:
        check: The section that found it, or the setting that it is about.
        level: How bad it is.
        message: What it is, in a sentence.
        advice: What to do, in a sentence.
    """

    check: str
    level: Level
    message: str
    advice: str


@dataclass(slots=True)
class Section:
    """One thing that was looked at.

    Attributes:
        name: Its name in the report.
        facts: What is there, as JSON.
        findings: What is wrong with it.
    """

    name: str
    facts: Any
    findings: list[Finding] = field(default_factory=list)

    def add(self, level: Level, message: str, advice: str, *, check: str = "") -> None:
        """Note a finding."""
        self.findings.append(Finding(check or self.name, level, message, advice))

    def unsafe(self, message: str, advice: str, *, check: str = "") -> None:
        """Note an unsafe finding."""
        self.add(Level.UNSAFE, message, advice, check=check)
