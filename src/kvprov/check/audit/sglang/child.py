"""`python -m kvprov.check.audit.sglang.child`: the audit of the installed SGLang, as JSON on stdout."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from kvprov.check.audit.output import answer
from kvprov.check.audit.probe import audit
from kvprov.check.audit.report import EngineReport
from kvprov.check.audit.subject import declared_subjects


def run(root: Path) -> EngineReport:
    """Audit SGLang: first as it is, then with binding in effect in this process.

    Args:
        root: A folder for files.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["KVPROV_MODE"] = "off"
    # Where entries lie is no part of their names.
    os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
    from kvprov.check.audit.sglang import catalogue, world

    world.prepare()
    found = catalogue.catalogue(root, declared_subjects())
    native = audit(found.subjects, bound=False)
    del os.environ["KVPROV_MODE"]
    from kvprov.engines.sglang.seams import SEAMS

    SEAMS.install()
    bound = audit(found.subjects, native=False)
    rows = tuple(one.with_bound(other) for one, other in zip(native, bound, strict=True))
    versions = {"sglang": version("sglang")}
    return EngineReport("sglang", versions, rows, found.refused, tuple(found.unknown), found.skipped)


if __name__ == "__main__":
    answer(run)
