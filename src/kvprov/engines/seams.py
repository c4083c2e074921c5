"""The places where an engine is made to call kvprov, and proof that they are still there.

Each seam replaces one function of the engine by name. A release that renames one, or gives it other parameters, is
found here and refused before it serves anything; one that goes around a seam is found by the engine's self-check.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvprov.errors import BindingError

MARK = "_kvprov_original"
"""Name of the attribute in which a replacement keeps what it replaces."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of an engine that kvprov wraps.

    Attributes:
        module: Where it is.
        name: Its name, with its class.
        parameters: The parameters that kvprov relies on, in their order.
        wrap: Makes the replacement from the original.
        by_name: Whether other modules import it by name, so that it has to be replaced there, too.
        optional: Whether some supported releases do without it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    by_name: bool = False
    optional: bool = False


class Seams:
    """The seams of one engine, in this process.

    Args:
        engine: The engine's name, for errors.
        package: The engine's package, in whose modules functions are imported by name.
        version: Gives the engine's release, for errors.
        seams: Gives the seams, in the order in which they are put into effect.
    """

    def __init__(
        self, engine: str, package: str, version: Callable[[], str], seams: Callable[[], tuple[Seam, ...]]
    ) -> None:
        self._engine = engine
        self._package = package
        self._version = version
        self._seams = seams
        self.installed = False

    def all(self) -> tuple[Seam, ...]:
        """Return the seams of this release: all but the optional ones that it does without."""
        return tuple(seam for seam in self._seams() if not seam.optional or _find(seam)[2] is not None)

    def _refuse(self, what: str) -> BindingError:
        return BindingError(
            f"{self._engine} {self._version()} has no {what} as kvprov needs it, so keys cannot be bound.",
            f"Install a release of {self._engine} that this release of kvprov supports (see README), or set "
            "KVPROV_MODE=off to run without any protection.",
        )

    def _locate(self, seam: Seam) -> tuple[Any, str, Any]:
        """Return the owner, the attribute's name and the attribute itself, as it stands in the owner's namespace.

        Raises:
            BindingError: The owner has no such function of its own (an inherited one is another), or one with other
                parameters.
        """
        try:
            owner, name, attribute = _find(seam)
        except ImportError as error:
            raise self._refuse(f"module {seam.module}") from error
        if attribute is None:
            raise self._refuse(f"{seam.module}.{seam.name}")
        parameters = tuple(inspect.signature(_function(attribute)).parameters)
        if parameters[: len(seam.parameters)] != seam.parameters:
            raise self._refuse(f"{seam.module}.{seam.name} with parameters {seam.parameters}")
        return owner, name, attribute

    def install_one(self, seam: Seam) -> None:
        """Put one seam into effect; doing it twice changes nothing.

        Raises:
            BindingError: This release lacks it.
        """
        owner, name, attribute = self._locate(seam)
        is_classmethod, function = isinstance(attribute, classmethod), _function(attribute)
        if hasattr(function, MARK):
            return
        # The original of a classmethod is called through the class, so that it sees the class as the engine passes it.
        replacement = seam.wrap(functools.partial(function, owner) if is_classmethod else function)
        functools.update_wrapper(replacement, function)
        setattr(replacement, MARK, function)
        kind = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
        setattr(owner, name, replacement if kind is None else kind(replacement))
        if seam.by_name:
            for module in list(sys.modules.values()):
                inside = getattr(module, "__name__", "").startswith(f"{self._package}.")
                if inside and vars(module).get(name) is function:
                    setattr(module, name, replacement)

    def install(self) -> None:
        """Put every seam into effect in this process; doing it twice changes nothing.

        Raises:
            BindingError: This release lacks a seam. Nothing is served half-bound: the engine does not start.
        """
        if self.installed:
            return
        seams = self.all()
        for seam in seams:
            self._locate(seam)
        for seam in seams:
            self.install_one(seam)
        self.installed = True

    def undone(self) -> list[str]:
        """Return the seams that are no longer in effect: something has replaced the engine's function after kvprov did.

        A replacement that keeps what it wraps, as `functools.wraps` does, leaves the seam in effect.
        """
        names = []
        for seam in self.all():
            function: Any = _function(self._locate(seam)[2])
            while function is not None and not hasattr(function, MARK):
                function = getattr(function, "__wrapped__", None)
            if function is None:
                names.append(f"{seam.module}.{seam.name}")
        return names


def _find(seam: Seam) -> tuple[Any, str, Any]:
    owner: Any = importlib.import_module(seam.module)
    *classes, name = seam.name.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
    return owner, name, None if owner is None else vars(owner).get(name)


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
