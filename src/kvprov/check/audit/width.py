"""How much of a fact enters a key: by the width of what varies in keys, and by keys that meet.

What varies shows an upper bound at once: sixteen bits that are cut from a hash show as four hexadecimal digits. A cut
that is hashed again shows nothing; it is found by keys of different values that meet, which of `n` samples some do if
fewer than about `2 * log2(n)` bits enter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

_MANY: Final = 64
"""From so many samples on, a place that could vary has varied."""
_LEAST_HASH: Final = 8
"""Fewer characters are taken for a hash only when many samples vary."""
_WORD: Final = re.compile(r"[0-9A-Za-z]+")
_HEX: Final = re.compile(r"[0-9a-f]+|[0-9A-F]+")


def _texts(keys: Sequence[bytes]) -> list[str]:
    """Return keys as text: as they are when all are printable ASCII, else in hexadecimal."""
    if all(32 <= byte < 127 for key in keys for byte in key):
        return [key.decode("ascii") for key in keys]
    return [key.hex() for key in keys]


def _positions(words: Sequence[str]) -> int:
    return sum(len(set(column)) > 1 for column in zip(*words, strict=True))


def _word_bits(words: Sequence[str]) -> float:
    """Return how many bits one word can hold that is not the same in all keys."""
    same_length = len({len(word) for word in words}) == 1
    is_hex = all(_HEX.fullmatch(word) for word in words)
    if len(words) < _MANY:
        # Too few to see which places vary. A word of a hash's form is one; any other stands for itself.
        return 4.0 * len(words[0]) if is_hex and same_length and len(words[0]) >= _LEAST_HASH else math.inf
    places = _positions(words) if same_length else max(map(len, words))
    if all(word.isdecimal() for word in words):
        return places * math.log2(10)
    return places * (4.0 if is_hex else math.log2(62))


def visible_bits(keys: Sequence[bytes]) -> float:
    """Return how many bits the varying parts of `keys` can hold; infinity where that cannot be seen.

    Args:
        keys: Of different values of one fact. Two of them differ at least.
    """
    texts = _texts(keys)
    split = [_WORD.findall(text) for text in texts]
    if len({len(words) for words in split}) == 1:
        columns = [column for column in zip(*split, strict=True) if len(set(column)) > 1]
        # One hash may stand in a key twice, as when folders are named by its first digits.
        return sum(_word_bits(column) for column in columns if not _within(column, columns)) if columns else math.inf
    if len(texts) < _MANY:
        return math.inf
    # Characters that separate words occur in what varies, as in base64url.
    return 6.0 * max(_middle(texts))


def _within(column: Sequence[str], columns: Sequence[Sequence[str]]) -> bool:
    return any(
        other is not column and all(len(a) < len(b) and a in b for a, b in zip(column, other, strict=True))
        for other in columns
    )


def _middle(texts: Sequence[str]) -> list[int]:
    """Return the length of each text without what all begin and end with."""
    low, high = min(texts), max(texts)
    start = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    ends = [text[start:][::-1] for text in texts]
    low, high = min(ends), max(ends)
    end = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return [len(text) - start - end for text in texts]


def colliding_bits(samples: int, distinct: int) -> float:
    """Return how many bits enter, if `samples` values have `distinct` keys: the number that explains it best.

    Infinity where no two met.
    """
    if distinct >= samples:
        return math.inf

    def expected(bits: int) -> float:
        values = 2.0**bits
        return values * -math.expm1(samples * math.log1p(-1.0 / values)) if bits else 1.0

    return float(min(range(64), key=lambda bits: abs(expected(bits) - distinct)))


def _surprising(samples: int, distinct: int, bits: float) -> bool:
    """Whether so many keys meet that `bits` cannot be all that enters: chance does it in one of a million audits."""
    met = samples - distinct
    expected = samples**2 / 2.0 ** (bits + 1) if bits < math.inf else 0.0
    if met == 0 or met <= expected:
        return False
    # Chernoff's bound on a Poisson distribution's tail.
    return expected == 0.0 or met - expected + met * math.log(expected / met) < math.log(1e-6)


def effective_bits(keys: Sequence[bytes]) -> int | None:
    """Return how many bits of a fact enter keys at most, or None where nothing narrower than the fact was seen.

    Args:
        keys: The key of one entry under each of several values of the fact.
    """
    distinct = len(set(keys))
    if distinct == 1:
        return 0
    bits = visible_bits(keys)
    if _surprising(len(keys), distinct, bits):
        bits = colliding_bits(len(keys), distinct)
    return None if math.isinf(bits) else max(1, round(bits))
