"""Steps that tests make an engine take. Nothing here imports kvprov: some engines run without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.support.engine import Answer, Engine
from tests.support.models import BUNDLED


def generate(engine: Engine, **request: Any) -> list[Answer]:
    return engine.generate(**request)


def call(_engine: Engine, *, function: Callable[[], Any]) -> Any:
    return function()


def complete_embeddings(engine: Engine, *, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Complete `prompts` given as the rows of the model's own embedding."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    table = load_file(BUNDLED / "base" / "model.safetensors")["model.embed_tokens.weight"]
    parameters = SamplingParams(temperature=0, max_tokens=32, detokenize=False, ignore_eos=True)
    inputs = [{"prompt_embeds": table[prompt]} for prompt in prompts]
    return [tuple(o.outputs[0].token_ids) for o in engine.llm.generate(inputs, parameters, use_tqdm=False)]


def bypassed(engine: Engine, *, reason: str) -> int:
    """Return how many requests the engine says have bypassed the tier for `reason`."""
    found = [m for m in engine.llm.get_metrics() if m.name == "vllm:kvprov_bypassed_requests"]
    return int(sum(m.value for m in found if m.labels["reason"] == reason))


def loaded(answers: Iterable[Answer]) -> int:
    return sum(answer.loaded for answer in answers)


def tokens(answers: Iterable[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def same(ours: list[Answer], theirs: list[Answer]) -> bool:
    """Whether tokens and log probabilities are equal, the latter to within rounding."""
    return tokens(ours) == tokens(theirs) and all(
        abs(x - y) < 1e-4
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )
