"""`python -m kvprov.engines.sglang.inspect`: what kvprov binds in the installed SGLang, as JSON on stdout.

For `kvprov doctor`, which imports no engine itself. Every seam is put into effect, which is the surest way to see that
it can be: so run it in a process of its own, never in one that serves.
"""

from __future__ import annotations

from typing import Any, Final

from kvprov.engines.inspection import examine, report

_NOT_BOUND: Final = "kvprov does not know it: entries would be shared without regard to provenance"


def _paths() -> list[dict[str, Any]]:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    from kvprov.engines.sglang import paths

    entries = dict(paths.rows())
    known = StorageBackendFactory._registry
    for name in known.keys() - paths.BACKENDS.keys():
        entries[paths.backend_row(name)] = paths.Entry(paths.Treatment.REFUSED, _NOT_BOUND)
    # What this release does not have is of no interest.
    absent = paths.BACKENDS.keys() - known.keys() - {paths.DYNAMIC}
    for name in absent:
        del entries[paths.backend_row(name)]
    return [
        {
            "name": name,
            "bound": entry.allowed,
            "treatment": entry.treatment,
            "reason": entry.reason,
            "strength": entry.strength,
        }
        for name, entry in sorted(entries.items())
    ]


def inspect() -> dict[str, Any]:
    """Return the version of SGLang, each seam with what is wrong with it, and each path with its treatment."""
    from sglang.version import __version__

    from kvprov.engines.sglang.seams import SEAMS

    return {"version": __version__, "seams": examine(SEAMS), "paths": _paths()}


def main() -> None:
    """Print the result, and nothing else."""
    report(inspect)


if __name__ == "__main__":
    main()
