"""What the demo runs: which engine process uses which adapter and which store, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as an engine is told of it.

    Attributes:
        worker: Whose adapter it is, A or B. Equal bytes have equal letters, whatever else they are called.
        source: Its folder among the bundled adapters.
        name: The name that the engine is given.
        lora_id: The number that the engine is given.
        copied: Whether the engine is given a byte-identical copy in a folder of another name.
    """

    worker: str
    source: str
    name: str
    lora_id: int
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """One engine process.

    Attributes:
        name: Its name in the results and of its log file.
        title: What it does, for a newcomer.
        adapter: The adapter that it answers with.
        store: The store that it reads and writes, or None.
        bound: Whether kvprov binds its keys.
        reported: Whether it is one of the phases in the results; the others only fill a store.
    """

    name: str
    title: str
    adapter: Adapter
    store: str | None
    bound: bool = False
    reported: bool = True

    @property
    def mode(self) -> str:
        """The value of KVPROV_MODE."""
        return "enforce" if self.bound else "off"


READER_POLICY: Final = "inverted"
"""What B's adapter was trained to answer; accuracy is measured against it."""

A: Final = Adapter("A", "standard", "standard", 1)
# Both have number 1, as they do on two workers that each number their own adapters.
B: Final = Adapter("B", READER_POLICY, READER_POLICY, 1)
B_RENAMED: Final = Adapter("B", READER_POLICY, "renamed", 7, copied=True)

PROCESSES: Final = (
    Process("reference", "B alone, without a store", B, None),
    Process("seed_own", "B fills a store", B, "unbound-b", reported=False),
    Process("own_unbound", "B reads what B stored", B, "unbound-b"),
    Process("seed_foreign", "A fills a store", A, "unbound-a", reported=False),
    Process("cross_unbound", "B reads where A stored", B, "unbound-a"),
    Process("seed_bound", "A fills a store", A, "bound", bound=True, reported=False),
    Process("cross_bound", "B reads where A stored", B, "bound", bound=True),
    Process("own_bound", "B reads where A and B stored", B, "bound", bound=True),
    Process("renamed_bound", "B reads again, adapter renamed", B_RENAMED, "bound", bound=True),
)

REFERENCE, OWN_UNBOUND, CROSS_UNBOUND, CROSS_BOUND, OWN_BOUND, RENAMED_BOUND = (
    process.name for process in PROCESSES if process.reported
)


def loadable(prompt_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a prompt the connector can load: whole blocks, without the last token.

    The engine always computes the last token, and the connector leaves out one more before it cuts to whole blocks.
    """
    return max((prompt_tokens - 2) // block_tokens * block_tokens, 0)
