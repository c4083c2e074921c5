"""What is audited: the code that makes a connector's keys, as a function of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, TypeAlias

from kvprov.check.audit.scenario import Scenario
from kvprov.contract.errors import KvprovError
from kvprov.errors import SettingsError

GROUP: Final = "kvprov.audit"
"""Entry points of this group give a `Subject`, or a function without arguments that returns a list of them."""


class NotApplicableError(Exception):
    """A path to keys has no place for a dimension: nothing that it computes or serves could depend on it.

    Args:
        dimension: The dimension.
    """

    def __init__(self, dimension: str) -> None:
        super().__init__(dimension)
        self.dimension = dimension


class AuditError(KvprovError):
    """A connector that cannot be judged: its keys are not stable, or its code could not be driven."""


KeyFunction: TypeAlias = Callable[[Scenario], Sequence[bytes]]
"""Returns the key of each entry of a scenario's prompt, in their order.

Raises:
    NotApplicableError: The scenario sets a fact that this path has no place for.
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is spent on one fact that changes keys, to find out how much of it enters.

    Attributes:
        samples: How many values are tried at most.
        seconds: For how long, after the first few.
        few: How many are tried in any case, where there are as many.
    """

    samples: int = 4096
    seconds: float = 5.0
    few: int = 4


@dataclass(frozen=True, slots=True)
class Subject:
    """The keys of one connector, or of one of its tiers.

    Attributes:
        name: As reports show it.
        connector: The engine's name for the connector.
        native: The engine's own key code.
        bound: The same with kvprov in effect; None where kvprov does not bind it.
        unbound: Why not; empty when it is bound.
        note: What a reader should know of it.
        budget: What may be spent on one fact.
    """

    name: str
    connector: str
    native: KeyFunction
    bound: KeyFunction | None = None
    unbound: str = "kvprov does not bind it"
    note: str = ""
    budget: Budget = Budget()


def declared_subjects() -> list[Subject]:
    """Return the subjects that installed packages declare: drivers of connectors that kvprov does not know.

    Raises:
        SettingsError: An entry point cannot be loaded, or gives something else.
    """
    found: list[Subject] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        advice = f"Mend or uninstall the package that declares the entry point {point.name!r} in {GROUP!r}."
        try:
            given = point.load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                f"The audit driver {point.name!r} ({point.value}) cannot be loaded: {error}.", advice
            ) from error
        subjects = [given] if isinstance(given, Subject) else given() if callable(given) else None
        if not isinstance(subjects, list) or not all(isinstance(subject, Subject) for subject in subjects):
            raise SettingsError(f"The audit driver {point.name!r} ({point.value}) gives no subjects.", advice)
        found += subjects
    return found
