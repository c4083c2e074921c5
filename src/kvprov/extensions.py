"""Dimensions from outside the package, found by entry point.

An entry point of the group `kvprov.dimensions` names an `Extension`: the registry entry, and a function that
supplies its value. Nothing else changes: encoder, key code and connectors take the dimension as they take the
built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from kvprov.contract.descriptor import Value
from kvprov.contract.dimension import Dimension
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.registry import Registry
from kvprov.errors import SettingsError

GROUP = "kvprov.dimensions"


@dataclass(frozen=True, slots=True)
class Extension:
    """A dimension that another package registers.

    Attributes:
        dimension: The registry entry; its name carries a dotted prefix, as in `acme.rope_patch`.
        value: Supplies the value. For the worker half it is called once with the engine's configuration object,
            for the request half with each of the engine's request objects.
    """

    dimension: Dimension
    value: Callable[[Any], Value]


def load_extensions() -> tuple[Extension, ...]:
    """Return the extensions that installed packages declare, by name.

    Raises:
        SettingsError: An entry point cannot be loaded, is not an `Extension`, or lacks a dotted prefix.
    """
    extensions: dict[str, Extension] = {}
    for point in entry_points(group=GROUP):
        advice = f"Mend or uninstall the package that declares the entry point {point.name!r} in {GROUP!r}."
        try:
            extension = point.load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                f"The dimension {point.name!r} ({point.value}) cannot be loaded: {error}.", advice
            ) from error
        if not isinstance(extension, Extension):
            raise SettingsError(f"The entry point {point.name!r} ({point.value}) is not a kvprov Extension.", advice)
        name = extension.dimension.name
        if "." not in name:
            raise SettingsError(
                f"The dimension {name!r} of {point.value} has no prefix.",
                "Name it with the owner's prefix and a dot, as in 'acme.rope_patch'.",
            )
        if name in extensions:
            raise SettingsError(f"The dimension {name!r} is declared by two entry points.", advice)
        extensions[name] = extension
    return tuple(extensions[name] for name in sorted(extensions))


def registry_with(extensions: tuple[Extension, ...], withhold: tuple[str, ...] = ()) -> Registry:
    """Return the built-in registry with `extensions`, less the dimensions to withhold.

    Raises:
        ContractError: see `Registry`.
    """
    return BUILT_IN.register(*(extension.dimension for extension in extensions)).withhold(*withhold)
