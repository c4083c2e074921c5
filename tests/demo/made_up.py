"""Made-up results in which every claim holds, and ways to change one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvprov.demo.plan import PROCESSES, Process
from kvprov.demo.results import Outcome, Results

REVIEWS = 200
PROMPT_TOKENS = 28_000
LOADABLE = 25_600
WANTED = (" yes", " no") * (REVIEWS // 2)
WRONG = tuple(" no" if text == " yes" else " yes" for text in WANTED)
ALONE = WRONG[:3] + WANTED[3:]

READ = {
    "own_unbound": {"B": LOADABLE},
    "cross_unbound": {"A": LOADABLE},
    "own_bound": {"B": LOADABLE},
    "renamed_bound": {"B": LOADABLE},
}
OFFERED = {
    "own_unbound": {"B": LOADABLE},
    "cross_unbound": {"A": LOADABLE},
    "cross_bound": {"A": LOADABLE},
    "own_bound": {"A": LOADABLE, "B": LOADABLE},
    "renamed_bound": {"A": LOADABLE, "B": LOADABLE},
}


def _outcome(process: Process) -> Outcome:
    read = READ.get(process.name, {})
    return Outcome(
        process=process,
        answers=WRONG if process.name == "cross_unbound" else ALONE,
        prompt_tokens=PROMPT_TOKENS,
        tokens_loadable=LOADABLE,
        tokens_loaded=sum(read.values()),
        tokens_cached=sum(read.values()),
        tokens_read=read,
        tokens_offered=OFFERED.get(process.name, {}),
        entries_written=0 if read or process.store is None else REVIEWS,
        adapter_sha256=process.adapter.worker.lower() * 64,
        adapter_folder=process.adapter.name,
        seconds=12.34,
    )


def results(**changes: dict[str, Any]) -> Results:
    """Results in which every claim holds, but for what `changes` says of single processes."""
    outcomes = tuple(replace(_outcome(process), **changes.get(process.name, {})) for process in PROCESSES)
    return Results(WANTED, outcomes, {"kvprov": "1.2.3", "vllm": "4.5.6"}, 123.4)


def loads(**read: int) -> dict[str, Any]:
    """What a process reads, by writer, as all three measures give it."""
    total = sum(read.values())
    return {"tokens_read": dict(read), "tokens_loaded": total, "tokens_cached": total}
