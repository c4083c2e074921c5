"""What the tests measured in SGLang, for the table in the documents."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.support.sglang.case_runner import BOUND_S, Attempt, Measured
from tests.support.sglang.cases import Case
from tests.support.sglang.engine import RELEASE, Answer
from tests.support.steps import same

RESULTS = Path(__file__).parents[3] / "build" / "sglang" / "results.json"
PATH = "hicache:file"
KEY = ("release", "path", "page_size", "case", "binding")


def row(
    page: int, case: str, dimension: str, binding: str, *, foreign: int | None, own: int | None, loadable: int,
    matches: bool, note: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return one row.

    Args:
        page: Tokens of a page.
        case: What differs between who wrote and who reads.
        dimension: The dimensions that it belongs to.
        binding: unbound, bound or withheld.
        foreign: Tokens that were read and must not be; None where the request has no answer.
        own: Tokens that were read and may be; None where nobody asked.
        loadable: How many there are to read.
        matches: Whether the answer is that of an engine without a store.
        note: What else is to be said.
    """
    return {
        "path": PATH,
        "dimension": dimension,
        "binding": binding,
        "foreign_tokens": foreign,
        "own_tokens": own,
        "loadable_tokens": loadable,
        "matches_reference": matches,
        "note": note,
        "release": RELEASE,
        "page_size": page,
        "case": case,
    }


def rows(measured: Measured, page: int) -> Iterator[dict[str, Any]]:
    """Give the rows of all cases."""
    for (binding, case), attempt in measured.foreign.items():
        again = measured.again.get((binding, case))
        reference = measured.references[case]
        if attempt.answer is None:
            foreign, own, matches, note = None, None, False, f"no answer within {BOUND_S:.0f} s"
        else:
            foreign = attempt.stored
            own = None if again is None or (binding != "bound" and foreign) else again.stored
            matches, note = same([attempt.answer], [reference]), _note(measured, binding, case, attempt.answer)
        yield row(
            page, case.label, "+".join(case.dimensions), binding, foreign=foreign, own=own,
            loadable=measured.loadable[case], matches=matches, note=note,
        )  # fmt: skip


def declined(measured: Measured, binding: str, case: Case) -> bool:
    """Whether an entry was found, and could not be loaded."""
    return "Short read" in measured.logs[binding, case]


def _note(measured: Measured, binding: str, case: Case, answer: Answer) -> str:
    if declined(measured, binding, case):
        again = measured.again[binding, case]
        return "declines the entry" + ("" if again.stored else ", and stores none of its own")
    return "log probabilities are not numbers" if any(map(math.isnan, answer.logprobs)) else ""


def local(attempt: Attempt) -> int:
    """Return how many tokens the engine itself still held."""
    assert attempt.answer is not None
    return attempt.answer.device + attempt.answer.host


def record(new: Iterable[dict[str, Any]]) -> None:
    """Put rows into the file of results, in place of earlier ones of the same case."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.with_suffix(".lock").open("w") as lock:
        # Several test processes add to the file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        merged = {tuple(one[name] for name in KEY): one for one in [*kept, *new]}
        RESULTS.write_text(json.dumps({"rows": [merged[key] for key in sorted(merged)]}, indent=1) + "\n")
