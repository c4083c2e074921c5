"""What protects the engines that are started in this environment, and what does not.

Each section looks at one thing and imports no engine; the section on an engine asks a process of its own. A section
gives facts, for the report, and findings, which say what is wrong. Nothing here raises for what it finds.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import kvprov
from kvprov.doctor.finding import Finding, Level, Section

__all__ = ["Diagnosis", "Finding", "Level", "Section", "diagnose"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        sections: What was looked at, in the order of the report.
    """

    sections: tuple[Section, ...]

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first."""
        found = [finding for section in self.sections for finding in section.findings]
        return sorted(found, key=lambda finding: list(Level).index(finding.level))

    def has(self, level: Level) -> bool:
        """Whether there is a finding of this level."""
        return any(finding.level is level for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON: `safe`, `findings`, and the facts of each section under its name.

        `vllm` and `sglang` are null where the engine is not installed or was not asked.
        """
        facts = {section.name: section.facts for section in self.sections}
        return {
            "safe": not self.has(Level.UNSAFE) and not self.has(Level.FAILED),
            "findings": [asdict(finding) for finding in self.findings],
            **facts,
        }


def _versions() -> Section:
    return Section("versions", {"kvprov": kvprov.__version__, "python": platform.python_version()})


def diagnose(*, inspect_engines: bool = True) -> Diagnosis:
    """Look at this environment.

    Args:
        inspect_engines: Whether to import an installed engine, in a process of its own, to see what kvprov binds in it.
    """
    from kvprov.doctor.cache import cache_section
    from kvprov.doctor.dimensions import dimensions_section
    from kvprov.doctor.engines import HOSTS, engines_section, inspected_section, installed, plugins_section
    from kvprov.doctor.ledger import ledger_section
    from kvprov.doctor.settings import secret_section, settings_section

    settings, settings_found = settings_section()
    sections = (
        _versions(),
        settings_found,
        secret_section(settings),
        dimensions_section(settings),
        cache_section(),
        ledger_section(settings),
        engines_section(),
        plugins_section(),
        *(
            inspected_section(engine) if inspect_engines and installed(engine) else Section(engine, None)
            for engine in HOSTS
        ),
    )
    return Diagnosis(sections)
