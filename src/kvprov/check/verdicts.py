"""What a check says of a pair, and of a dimension over its pairs. No input or output."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """What is said of a pair of configurations, and of a dimension over its pairs."""

    SOUND = "sound"
    """They must not share, and their keys differ."""
    OMISSION = "omission"
    """They must not share, and they have one key: the state differs, or sharing is not allowed."""
    OVER_SEPARATED = "over-separated"
    """The state is the same and sharing is allowed, and the keys differ."""
    SHARED = "shared"
    """The state is the same and sharing is allowed, and they have one key."""
    NOT_TESTED = "not tested"
    """Nothing was compared, so nothing is said."""


_BY_WEIGHT = (Verdict.OMISSION, Verdict.OVER_SEPARATED, Verdict.SOUND, Verdict.SHARED)


class Fault(enum.StrEnum):
    """What is wrong with a key function, where the check can tell."""

    NOT_BOUND = "not bound"
    """The dimension's value is not in the key."""
    NEEDLESS = "separates needlessly"
    """Two values that store the same bytes and may share have different keys."""
    NEVER_SHARES = "never shares"
    """One configuration has another key each time."""
    PROCESS = "depends on the process"
    """One configuration has another key in another process."""
    PATH = "keys on the path"
    """The key follows where content is, not what it is."""
    NAME = "keys on the name"
    """The key follows what a folder is called, not what it holds."""
    TENSOR = "leaves out a tensor"
    """One tensor of an adapter is not in the key."""
    TENSOR_NAMES = "leaves out the names of tensors"
    """Two adapters whose tensors are exchanged have one key."""
    ADAPTER_CONFIG = "leaves out the adapter's configuration"
    """Two adapters of equal tensors that are applied differently have one key."""
    TRUNCATED = "truncated"
    """Different values have one key so often that it must have lost most of their bits."""
    JOINED = "joins fields without lengths"
    """Two pairs of fields have one key, since it does not say where one field ends and the next begins."""
    ABSENT = "takes no value for a value"
    """A request without the value has the key of a request with a text that stands for none."""


def judge(must_separate: bool, same_key: bool) -> Verdict:
    """Return the verdict of one pair.

    Args:
        must_separate: Whether the state differs, or sharing is not allowed.
        same_key: Whether the key function gives both one key.
    """
    if must_separate:
        return Verdict.OMISSION if same_key else Verdict.SOUND
    return Verdict.SHARED if same_key else Verdict.OVER_SEPARATED


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a dimension over its pairs: the worst of them.

    An omission outweighs over-separation, since it is unsafe. A dimension of which some pairs share as they should and
    others separate as they should is sound. One without pairs is not tested.
    """
    found = set(verdicts)
    return next((verdict for verdict in _BY_WEIGHT if verdict in found), Verdict.NOT_TESTED)


def bits_left(values: int, collisions: int) -> float:
    """Return about how many bits a function keeps of which `values` random values made `collisions` equal pairs.

    Of n values in a range of 2^b, n(n-1)/2 / 2^b pairs are expected to be equal.
    """
    return math.log2(values * (values - 1) / 2 / collisions)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, in words.

    Attributes:
        dimension: Which dimension it is about.
        verdict: `omission` or `over-separated`.
        fault: What the key function does wrong.
        message: One sentence.
    """

    dimension: str
    verdict: Verdict
    fault: Fault
    message: str
