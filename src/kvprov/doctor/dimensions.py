"""The dimensions that are bound: built in and from other packages, less those withheld."""

from __future__ import annotations

from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.errors import KvprovError
from kvprov.doctor.finding import Section
from kvprov.extensions import GROUP, Extension, load_extensions, registry_with
from kvprov.settings import Settings


def dimensions_section(settings: Settings) -> Section:
    """List the registered dimensions. Those of `KVPROV_UNSAFE_WITHHOLD` are unsafe, as are broken extensions."""
    section = Section("dimensions", {"bound": [], "withheld": []})
    extensions = _extensions(section)
    try:
        registry = registry_with(extensions)
    except KvprovError as error:
        section.unsafe(error.message, error.advice)
        return section
    withheld = [name for name in settings.unsafe_withhold if name in registry]
    for name in settings.unsafe_withhold:
        if name not in registry:
            section.unsafe(
                f"KVPROV_UNSAFE_WITHHOLD names {name}, which is no dimension: engines do not start.",
                f"Dimensions are: {', '.join(sorted(d.name for d in registry))}.",
                check="KVPROV_UNSAFE_WITHHOLD",
            )
    section.facts["withheld"] = withheld
    section.facts["bound"] = [
        {"name": d.name, "half": d.half, "kind": d.kind, "built_in": d.name in BUILT_IN}
        for d in registry.withhold(*withheld)
    ]
    for name in withheld:
        section.unsafe(
            f"The dimension {name} is left out of every key: state is shared across its values.",
            "Unset KVPROV_UNSAFE_WITHHOLD.",
            check="KVPROV_UNSAFE_WITHHOLD",
        )
    return section


def _extensions(section: Section) -> tuple[Extension, ...]:
    try:
        return load_extensions()
    except KvprovError as error:
        section.unsafe(error.message, error.advice)
    except Exception as error:  # noqa: BLE001 - somebody else's package can fail in any way when it is imported
        section.unsafe(
            f"An extension raised {type(error).__name__} when it was loaded: {error}.",
            f"Mend or uninstall the packages with entry points in {GROUP!r}.",
        )
    return ()
