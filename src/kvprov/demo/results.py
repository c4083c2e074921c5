"""What was measured, what is claimed of it, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvprov.demo.plan import (
    CROSS_BOUND,
    CROSS_UNBOUND,
    OWN_BOUND,
    OWN_UNBOUND,
    REFERENCE,
    RENAMED_BOUND,
    Process,
)

LEAST_FOREIGN_SHARE: Final = 0.70
LEAST_POINTS_LOST: Final = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one process did.

    Attributes:
        process: What it was told to do.
        answers: Its answers, a text for each review.
        prompt_tokens: How many tokens the prompts have.
        tokens_loadable: How many of them the connector could load if every prompt had an entry.
        tokens_loaded: How many it loaded, as the engine's counter says.
        tokens_cached: How many it did not compute, as the requests' outputs say.
        tokens_read: How many tokens the entries hold that it opened, by their writer, as the kernel says.
        tokens_offered: How many tokens the store held for it when it started, by their writer.
        entries_written: How many entries it wrote.
        adapter_sha256: Digest of the adapter's files, taken by the process itself.
        adapter_folder: The name of the folder that they were in.
        seconds: How long the process ran, from start to end.
    """

    process: Process
    answers: tuple[str, ...]
    prompt_tokens: int
    tokens_loadable: int
    tokens_loaded: int
    tokens_cached: int
    tokens_read: dict[str, int]
    tokens_offered: dict[str, int]
    entries_written: int
    adapter_sha256: str
    adapter_folder: str
    seconds: float

    @property
    def tokens_foreign(self) -> int:
        """How many tokens of state it read that another adapter had written."""
        return sum(tokens for writer, tokens in self.tokens_read.items() if writer != self.process.adapter.worker)

    @property
    def tokens_own(self) -> int:
        """How many tokens of state it read that its own adapter had written."""
        return self.tokens_read.get(self.process.adapter.worker, 0)


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that must hold.

    Attributes:
        name: Its name.
        statement: What must hold, for a newcomer.
        measured: What was found.
        holds: Whether it does.
    """

    name: str
    statement: str
    measured: str
    holds: bool


def _same(worker: str, digests: set[str]) -> str:
    """Return in words whether every process of a worker had the same adapter."""
    if len(digests) == 1:
        return f"{worker}'s adapter had the same bytes in every process"
    return f"{worker}'s adapter had {len(digests)} different contents"


def percent(share: float) -> str:
    """Return a share as text, as in `98.5 %`."""
    return f"{100 * share:.1f} %"


@dataclass(frozen=True, slots=True)
class Results:
    """All that was measured.

    Attributes:
        wanted: The right answers, a text for each review.
        outcomes: What each process did, in the order in which they ran.
        versions: What it ran with.
        seconds: How long all of it took.
    """

    wanted: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    versions: dict[str, str]
    seconds: float

    @property
    def phases(self) -> Sequence[Outcome]:
        """The processes that are reported."""
        return [outcome for outcome in self.outcomes if outcome.process.reported]

    def phase(self, name: str) -> Outcome:
        """Return the phase of that name."""
        return next(outcome for outcome in self.outcomes if outcome.process.name == name)

    def correct(self, outcome: Outcome) -> int:
        """Return how many answers are right."""
        return sum(a == b for a, b in zip(outcome.answers, self.wanted, strict=True))

    def agreed(self, outcome: Outcome) -> int:
        """Return how many answers are the reference's."""
        return sum(a == b for a, b in zip(outcome.answers, self.phase(REFERENCE).answers, strict=True))

    def accuracy(self, outcome: Outcome) -> float:
        """Return the share of answers that are right."""
        return self.correct(outcome) / len(self.wanted)

    def agreement(self, outcome: Outcome) -> float:
        """Return the share of answers that are the reference's."""
        return self.agreed(outcome) / len(self.wanted)

    def claims(self) -> tuple[Claim, ...]:
        """Return every claim, with what was measured."""
        cross, bound = self.phase(CROSS_UNBOUND), self.phase(CROSS_BOUND)
        own, own_bound, renamed = self.phase(OWN_UNBOUND), self.phase(OWN_BOUND), self.phase(RENAMED_BOUND)
        before, after = self.accuracy(self.phase(REFERENCE)), self.accuracy(cross)
        share = cross.tokens_foreign / cross.prompt_tokens
        offered = bound.tokens_offered.get("A", 0)
        correct_before, correct_after = self.correct(self.phase(REFERENCE)), self.correct(cross)
        return (
            Claim(
                "foreign_read",
                f"Without kvprov, B is served A's state for {100 * LEAST_FOREIGN_SHARE:.0f} % of its tokens or more",
                f"{cross.tokens_foreign:,} of {cross.prompt_tokens:,} prompt tokens, {percent(share)}",
                share >= LEAST_FOREIGN_SHARE,
            ),
            Claim(
                "foreign_harm",
                f"Without kvprov, that costs B {LEAST_POINTS_LOST} points of accuracy or more",
                f"{percent(before)} alone, {percent(after)} with A's state",
                100 * (correct_before - correct_after) >= LEAST_POINTS_LOST * len(self.wanted),
            ),
            Claim(
                "bound_reads_nothing_foreign",
                "With kvprov, B is served nothing of A's, though the store holds as much of it",
                f"{bound.tokens_foreign:,} foreign tokens read of {offered:,} in the store",
                # Else a store that A never wrote to would prove it.
                offered == cross.tokens_offered.get("A", 0) > 0
                and bound.tokens_foreign
                == bound.tokens_loaded
                == own_bound.tokens_foreign
                == renamed.tokens_foreign
                == 0,
            ),
            Claim(
                "bound_answers_as_alone",
                "With kvprov, B answers as if it were alone",
                f"{self.agreed(bound)} of {len(self.wanted)} answers equal",
                self.agreed(bound) == len(self.wanted),
            ),
            Claim(
                "own_read_is_complete",
                "Without kvprov, B is served all of its own state that the connector can load",
                f"{own.tokens_loaded:,} of {own.tokens_loadable:,} tokens",
                0 < own.tokens_loaded == own.tokens_loadable,
            ),
            Claim(
                "own_read_is_kept",
                "With kvprov, B is served as much of its own state as without",
                f"{own_bound.tokens_loaded:,} tokens with, {own.tokens_loaded:,} without",
                own_bound.tokens_loaded == own.tokens_loaded,
            ),
            Claim(
                "renamed_read_is_kept",
                "With kvprov, the same adapter in another folder, under another name and number, is served as much",
                f"{renamed.tokens_loaded:,} tokens with, {own.tokens_loaded:,} without",
                renamed.tokens_loaded == own.tokens_loaded,
            ),
            self._adapters(),
            self._measures(),
        )

    def _adapters(self) -> Claim:
        readers = self.phases
        mine = {outcome.adapter_sha256 for outcome in self.outcomes if outcome.process.adapter.worker == "B"}
        theirs = {outcome.adapter_sha256 for outcome in self.outcomes if outcome.process.adapter.worker == "A"}
        renamed = self.phase(RENAMED_BOUND)
        kept = [
            outcome.process.name
            for outcome in readers
            if outcome is not renamed
            and (
                outcome.adapter_folder == renamed.adapter_folder
                or outcome.process.adapter.name == renamed.process.adapter.name
                or outcome.process.adapter.lora_id == renamed.process.adapter.lora_id
            )
        ]
        return Claim(
            "adapters_are_as_said",
            "A's and B's adapters differ, and the renamed one has the very bytes of B's",
            f"{_same('A', theirs)}, {_same('B', mine)}, and the two {'share bytes' if mine & theirs else 'differ'}"
            + (f"; the renamed one has a name, folder or number in common with {', '.join(kept)}" if kept else ""),
            len(mine) == len(theirs) == 1 and mine != theirs and not kept,
        )

    def _measures(self) -> Claim:
        differing = [
            outcome.process.name
            for outcome in self.outcomes
            if not outcome.tokens_loaded == outcome.tokens_cached == sum(outcome.tokens_read.values())
        ]
        return Claim(
            "measures_agree",
            "Engine counter, request outputs and files opened give the same tokens in every process",
            f"They differ in {', '.join(differing)}" if differing else f"Equal in all {len(self.outcomes)} processes",
            not differing,
        )

    def holds(self) -> bool:
        """Whether every claim holds."""
        return all(claim.holds for claim in self.claims())

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {
            "holds": self.holds(),
            "reviews": len(self.wanted),
            "seconds": round(self.seconds, 1),
            "phases": [
                {
                    "name": outcome.process.name,
                    "accuracy": self.accuracy(outcome),
                    "agreement": self.agreement(outcome),
                    "tokens_loaded": outcome.tokens_loaded,
                    "tokens_loadable": outcome.tokens_loadable,
                    "prompt_tokens": outcome.prompt_tokens,
                    "seconds": round(outcome.seconds, 1),
                }
                for outcome in self.phases
            ],
            "claims": [
                {"name": c.name, "statement": c.statement, "measured": c.measured, "holds": c.holds}
                for c in self.claims()
            ],
            "processes": [
                {
                    "name": outcome.process.name,
                    "worker": outcome.process.adapter.worker,
                    "adapter_name": outcome.process.adapter.name,
                    "adapter_folder": outcome.adapter_folder,
                    "adapter_id": outcome.process.adapter.lora_id,
                    "adapter_sha256": outcome.adapter_sha256,
                    "mode": outcome.process.mode,
                    "store": outcome.process.store,
                    "tokens_offered_by_writer": outcome.tokens_offered,
                    "tokens_read_by_writer": outcome.tokens_read,
                    "tokens_cached": outcome.tokens_cached,
                    "entries_written": outcome.entries_written,
                    "seconds": round(outcome.seconds, 1),
                }
                for outcome in self.outcomes
            ],
            "versions": self.versions,
        }
