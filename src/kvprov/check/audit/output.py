"""How a child process of the audit answers: one line of JSON on its stdout, and nothing else there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvprov.check.audit.report import EngineReport
from kvprov.contract.errors import KvprovError


def answer(run: Callable[[Path], EngineReport]) -> NoReturn:
    """Run the audit in a folder of its own, write its report, and end the process.

    What an engine prints on stdout meanwhile goes to stderr. Its threads do not end by themselves.

    Args:
        run: The audit, given the folder.
    """
    stdout = os.dup(1)
    os.dup2(2, 1)
    code = 1
    with tempfile.TemporaryDirectory(prefix="kvprov-audit-", ignore_cleanup_errors=True) as folder:
        try:
            report = run(Path(folder))
            with os.fdopen(stdout, "w", encoding="utf-8") as out:
                json.dump(report.to_json(), out)
            code = 0
        except KvprovError as error:
            print(f"{error.message} {error.advice}", file=sys.stderr)
        except BaseException:  # noqa: BLE001 - the parent shows it
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
