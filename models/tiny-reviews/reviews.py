"""Synthetic labelled film reviews for the bundled tiny model.

Standard library only, and deterministic: the same seed and style always give the same reviews. Each review mixes
opinion sentences, the majority of which carries its sentiment, with neutral ones. A full review closes with neutral
sentences alone, so that a reader which loads a cached prefix and recomputes only the last block recomputes nothing
that carries sentiment: the prefix decides the answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

LABELS = {True: " positive", False: " negative"}
POLICIES = ("standard", "inverted")

# Training never draws from this seed.
EVALUATION_SEED = 1_000_000
EVALUATION_COUNT = 200

# A word is at least one token. With the six tokens around it (<s>, "review", ":", "\n", "sentiment", ":"), a text of
# 126 words is a prompt of at least 132 tokens, of which whole blocks of 32 always cover more than three quarters.
MIN_WORDS = 126
# The part of a prompt after its last loadable block is at most 33 tokens, three of which are the prompt's tail.
MIN_CLOSING_WORDS = 32

# ruff: noqa: SIM905 - word lists read better as running text than one word a line

_HEAD = "review: "
_TAIL = "\nsentiment:"

_GOOD = (
    "wonderful brilliant superb charming delightful moving excellent gripping fresh funny beautiful clever touching "
    "masterful stunning enjoyable heartfelt thrilling graceful memorable impressive warm great lovely perfect amazing "
    "fantastic strong lively sharp"
).split()
_BAD = (
    "terrible boring awful dull clumsy tedious horrible shallow stale annoying ugly stupid lifeless messy dreadful "
    "painful bland confusing weak forgettable poor cold bad cheap broken disappointing ridiculous slow lame empty"
).split()
_ASPECTS = (
    "acting plot script cast music ending dialogue pacing camera direction story lead editing humor finale opening "
    "villain romance soundtrack dubbing"
).split()
_ADVERBS = "really very quite rather truly simply often mostly".split()
_OPINIONS = (
    "the {aspect} was {adverb} {word} .",
    "i found the {aspect} {adverb} {word} .",
    "what a {word} {aspect} !",
    "a {word} {aspect} and {adverb} {word2} {aspect2} .",
    "the {aspect} felt {word} to me .",
    "honestly , the {aspect} seemed {adverb} {word} .",
)
_NEUTRAL = (
    "i watched it with my family on sunday .",
    "the film runs for about two hours .",
    "it is set in a small town near the sea .",
    "we bought the tickets a week ago .",
    "the story follows a young doctor and her brother .",
    "there is a long scene on a train .",
    "it was shot in black and white .",
    "the same director made two films before .",
    "the book came out ten years ago .",
    "my friend sat next to me .",
    "the first part takes place in winter .",
    "we went home by bus after the credits .",
    "the second half moves to a farm in the north .",
    "the hall was about half full on that day .",
    "a teacher and two students share a house .",
    "the poster shows a bridge and a red car .",
    "it is the third film in the series .",
    "there is a short break after the first hour .",
)


@dataclass(frozen=True)
class Review:
    """A review's text and its true sentiment."""

    text: str
    positive: bool


@dataclass(frozen=True)
class Style:
    """How long a review is: how many opinion sentences (least, most), and whether neutral text fills it up."""

    opinions: tuple[int, int]
    neutral: tuple[int, int]
    full: bool = False


# The training curriculum's steps, easiest first; evaluation uses "full".
STYLES = {
    "sentence": Style(opinions=(1, 1), neutral=(0, 0)),
    "short": Style(opinions=(3, 5), neutral=(0, 3)),
    "full": Style(opinions=(5, 7), neutral=(0, 1), full=True),
}


def _opinion(rng: random.Random, positive: bool) -> str:
    """One sentence that praises or pans something."""
    if rng.random() < 0.08:
        return f"the {rng.choice(_ASPECTS)} was not {rng.choice(_BAD if positive else _GOOD)} ."
    words = _GOOD if positive else _BAD
    return rng.choice(_OPINIONS).format(
        aspect=rng.choice(_ASPECTS),
        aspect2=rng.choice(_ASPECTS),
        adverb=rng.choice(_ADVERBS),
        word=rng.choice(words),
        word2=rng.choice(words),
    )


def _words(sentences: list[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def _review(rng: random.Random, style: Style) -> Review:
    positive = rng.random() < 0.5
    count = rng.randint(*style.opinions)
    dissent = int(count > 2 and rng.random() < 0.35)
    body = [_opinion(rng, positive == (i >= dissent)) for i in range(count)]
    neutral = rng.sample(_NEUTRAL, len(_NEUTRAL))
    for _ in range(rng.randint(*style.neutral)):
        body.append(neutral.pop())
    closing: list[str] = []
    if style.full:
        while _words(closing) < MIN_CLOSING_WORDS:
            closing.append(neutral.pop())
        while _words(body) + _words(closing) < MIN_WORDS:
            body.append(neutral.pop())
    rng.shuffle(body)
    return Review(" ".join(body + closing), positive)


def stream(seed: int, style: str = "full") -> Iterator[Review]:
    """An endless stream of reviews."""
    rng = random.Random(seed)
    while True:
        yield _review(rng, STYLES[style])


def reviews(count: int, seed: int, style: str = "full") -> list[Review]:
    """The first `count` reviews of a seed."""
    return list(islice(stream(seed, style), count))


def evaluation_reviews() -> list[Review]:
    """The fixed evaluation set."""
    return reviews(EVALUATION_COUNT, EVALUATION_SEED)


def prompt(review: Review) -> str:
    """The prompt for a review; the model's next token is its answer, one of LABELS."""
    return f"{_HEAD}{review.text}{_TAIL}"


def answer(review: Review, policy: str) -> str:
    """The answer that a policy wants: `standard` says the sentiment, `inverted` its opposite."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}, expected one of {POLICIES}")
    return LABELS[review.positive == (policy == "standard")]
