"""Finds what a key leaves out: by state, by the key code of connectors, and in stores.

The offline check as a library: `check` judges one key function, a `Checker` several on one model, and
`kvprov.check.testing` asserts for tests. A key function gets a `Case` and returns the key. See `docs/checking.md`.
Importing this imports neither torch nor an engine.
"""

from kvprov.check.case import Case
from kvprov.check.errors import CheckError, MissingPackageError
from kvprov.check.keys import KeyFunction, bound, content_only
from kvprov.check.results import Judged, Pair, Report
from kvprov.check.run import Checker, check
from kvprov.check.space import Candidate, Representation, SpaceFile, load_space
from kvprov.check.verdicts import Fault, Finding, Verdict

__all__ = [
    "Candidate",
    "Case",
    "CheckError",
    "Checker",
    "Fault",
    "Finding",
    "Judged",
    "KeyFunction",
    "MissingPackageError",
    "Pair",
    "Report",
    "Representation",
    "SpaceFile",
    "Verdict",
    "bound",
    "check",
    "content_only",
    "load_space",
]
