"""The key audit: what the keys of a connector hold of each dimension, found by running the code that makes them.

It needs no model and no GPU. For each connector a small driver builds the engine's own objects from a `Scenario` and
returns the native keys that its code makes of them. The audit changes one fact of the scenario at a time, looks
whether the keys change, and by what of the fact. No verdict is written down anywhere.
"""

from kvprov.check.audit.probe import audit, audit_dimension
from kvprov.check.audit.report import EngineReport, Report, Row
from kvprov.check.audit.scenario import FACTS, Adapter, Fact, Scenario
from kvprov.check.audit.subject import Budget, NotApplicableError, Subject
from kvprov.check.audit.verdict import Cell, Verdict

__all__ = [
    "FACTS",
    "Adapter",
    "Budget",
    "Cell",
    "EngineReport",
    "Fact",
    "NotApplicableError",
    "Report",
    "Row",
    "Scenario",
    "Subject",
    "Verdict",
    "audit",
    "audit_dimension",
]
