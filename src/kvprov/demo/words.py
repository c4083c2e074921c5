"""The results in words, for terminal and report."""

from __future__ import annotations

from kvprov.demo.plan import CROSS_BOUND, CROSS_UNBOUND, OWN_BOUND, OWN_UNBOUND, REFERENCE, RENAMED_BOUND, Process
from kvprov.demo.results import Results, percent


def step(process: Process) -> str:
    """Return what a process does, and whether kvprov is in effect."""
    if process.store is None:
        return process.title
    return f"{process.title}, {'with' if process.bound else 'without'} kvprov"


def headline(results: Results) -> tuple[str, str]:
    """Return the result in two sentences: without kvprov, and with it. Both say what was measured, whatever it was."""
    reference, cross, bound = (results.phase(name) for name in (REFERENCE, CROSS_UNBOUND, CROSS_BOUND))
    own, own_bound, renamed = (results.phase(name) for name in (OWN_UNBOUND, OWN_BOUND, RENAMED_BOUND))
    share = percent(cross.tokens_foreign / cross.prompt_tokens)
    without = (
        f"Without kvprov, worker B was served state that adapter A had written, for {share} of its prompt tokens: its "
        f"accuracy went from {percent(results.accuracy(reference))} to {percent(results.accuracy(cross))}."
    )
    kept = own.tokens_loaded == own_bound.tokens_loaded == renamed.tokens_loaded
    reuse = (
        f"It still reads all {own_bound.tokens_loaded:,} tokens of its own state, also when its adapter has another "
        "folder, name and number."
        if kept
        else f"Of its own state it reads {own_bound.tokens_loaded:,} tokens, and {renamed.tokens_loaded:,} when its "
        f"adapter has another folder, name and number; without kvprov it reads {own.tokens_loaded:,}."
    )
    with_kvprov = (
        f"With kvprov, it was served {bound.tokens_foreign:,} foreign tokens and gave {results.agreed(bound)} of "
        f"{len(results.wanted)} answers as it does alone. {reuse}"
    )
    return without, with_kvprov
