"""`python -m kvprov.engines.vllm.inspect`: what kvprov binds in the installed vLLM, as JSON on stdout.

For `kvprov doctor`, which imports no engine itself. Every seam is put into effect, which is the surest way to see that
it can be: so run it in a process of its own, never in one that serves.
"""

from __future__ import annotations

from typing import Any, Final

from kvprov.engines.inspection import examine, report

_NOT_BOUND: Final = "kvprov does not bind its keys: entries would be shared without regard to provenance"


def _connectors() -> list[dict[str, Any]]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvprov.engines.vllm.connectors import BOUND, TABLE, Treatment

    found = []
    for name in sorted({*KVConnectorFactory._registry, *TABLE}):
        entry = TABLE.get(name)
        bound = entry is not None and entry.treatment in BOUND
        found.append(
            {
                "name": name,
                "bound": bound,
                "treatment": entry.treatment if entry is not None else Treatment.REFUSED,
                "reason": entry.reason if entry is not None else _NOT_BOUND,
                "strength": entry.strength if entry is not None else "",
            }
        )
    return found


def inspect() -> dict[str, Any]:
    """Return the version of vLLM, each seam with what is wrong with it, and each connector with its treatment."""
    import vllm

    from kvprov.engines.vllm.seams import SEAMS

    return {"version": vllm.__version__, "seams": examine(SEAMS), "connectors": _connectors()}


def main() -> None:
    """Print the result, and nothing else."""
    report(inspect)


if __name__ == "__main__":
    main()
