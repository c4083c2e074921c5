"""Speculative decoding and prompt embeddings: what is shared, what is not, and what of it stock mixes up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Answer, Engine, Launch
from tests.support.models import BLOCK, BUNDLED, Models, loadable
from tests.support.processes import EngineDiedError, Processes
from tests.support.provenance import copied
from tests.support.steps import call, generate, loaded, tokens

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
TOKENS = 32


def drafting(model: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 3}


@dataclass
class Speculation:
    """What each engine loaded and answered, by store and kind of speculation."""

    full: int
    read: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)
    logs: dict[tuple[str, str], str] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)

    def loaded(self, store: str, kind: str) -> int:
        return loaded(self.read[store, kind])


@pytest.fixture(scope="module")
def speculation(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Speculation:
    """Seeders first, each with a store of its own; then readers, each with a copy of a seeder's."""
    folder = tmp_path_factory.mktemp("speculation")
    moved, other = models.copy_base(folder / "moved"), models.copy_base(folder / "other")
    models.perturb(folder / "other")
    kinds: dict[str, Any] = {
        "none": None,
        "ngram": NGRAM,
        "draft": drafting(models.base),
        "moved draft": drafting(moved),
        "other draft": drafting(other),
    }
    ask = partial(generate, prompts=prompts, tokens=TOKENS)
    result = Speculation(sum(loadable(len(prompt)) for prompt in prompts))

    def execute(asked: list[tuple[str, str, Path]]) -> None:
        launches = [
            Launch(
                models.base,
                store,
                name.split()[0],
                args={"enable_lora": False} | ({"speculative_config": kinds[kind]} if kinds[kind] else {}),
            )
            for name, kind, store in asked
        ]
        for (name, kind, store), run in zip(
            asked, processes.run_all([(launch, [ask]) for launch in launches]), strict=True
        ):
            if isinstance(run, EngineDiedError):
                raise run
            result.read[name, kind] = run.results[0]
            result.logs[name, kind] = run.log
            result.files[f"{name}/{kind}"] = {file.name for file in store.rglob("*.safetensors")}

    stores = {}
    for name in ("enforce none", "enforce draft", "off draft"):
        stores[name] = folder / name
        stores[name].mkdir()
    execute([(name, name.split()[1], store) for name, store in stores.items()])
    readers = [("enforce none", "ngram"), ("enforce none", "draft"), ("enforce draft", "moved draft")]
    readers += [("enforce draft", "other draft"), ("enforce draft", "none"), ("off draft", "other draft")]
    execute([(name, kind, copied(stores[name], kind)) for name, kind in readers])
    return result


def test_engines_that_draft_without_a_model_share_with_those_that_do_not_speculate(speculation: Speculation) -> None:
    assert speculation.loaded("enforce none", "none") == 0
    assert speculation.loaded("enforce none", "ngram") == speculation.full
    assert tokens(speculation.read["enforce none", "ngram"]) == tokens(speculation.read["enforce none", "none"])


def test_equal_draft_models_share_wherever_they_are(speculation: Speculation) -> None:
    assert speculation.loaded("enforce draft", "draft") == 0
    assert speculation.loaded("enforce draft", "moved draft") == speculation.full
    # The entries do hold the draft's state.
    assert any("draft" in name for name in speculation.files["enforce draft/draft"])
    assert not any("draft" in name for name in speculation.files["enforce none/none"])
    assert "bypasses the shared tier" not in speculation.logs["enforce draft", "moved draft"]


@pytest.mark.parametrize(
    ("store", "kind"), [("enforce draft", "other draft"), ("enforce draft", "none"), ("enforce none", "draft")]
)
def test_state_of_another_draft_model_is_never_loaded(speculation: Speculation, store: str, kind: str) -> None:
    assert speculation.loaded(store, kind) == 0
    assert tokens(speculation.read[store, kind]) == tokens(speculation.read["enforce none", "none"])


def test_stock_loads_state_of_another_draft_model(speculation: Speculation) -> None:
    """What the test above is about. It costs accepted tokens, not right ones: the target checks each."""
    assert speculation.loaded("off draft", "other draft") == speculation.full


def on_disk(models: Models, folder: Path, **args: Any) -> Launch:
    """An engine with its own prefix cache, over a tier of files."""
    return Launch(
        models.base,
        folder,
        args={"enable_prefix_caching": True, "enable_lora": False} | args,
        connector={
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "tests.support.host_offload",
                "cpu_bytes_to_use": 32 << 20,
                "offload_prompt_only": False,
                "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
            },
        },
    )


SETTLE = partial(call, function=partial(time.sleep, 1.0))
"""A moment for the tier to write."""


def accepted(engine: Engine) -> int:
    """Return how many drafted tokens the target took."""
    found = [m for m in engine.llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    return int(sum(m.value for m in found))


def test_what_was_computed_while_speculating_is_what_others_compute(
    processes: Processes, models: Models, prompts: list[list[int]], store: Path
) -> None:
    """Also the blocks of accepted tokens, which this connector stores."""
    ask = partial(generate, prompts=prompts, tokens=100)
    seeded = processes.run(on_disk(models, store, speculative_config=NGRAM), ask, accepted, SETTLE)
    answers: list[Answer] = seeded.results[0]
    assert seeded.results[1] > 0
    longer = [prompt + list(answer.tokens[:80]) for prompt, answer in zip(prompts, answers, strict=True)]
    read = processes.run(on_disk(models, store), partial(generate, prompts=longer, tokens=20)).results[0]
    assert loaded(read) == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in longer)
    assert tokens(read) == [answer.tokens[80:] for answer in answers]


def embed(engine: Engine, *, prompts: list[list[int]], scale: float) -> tuple[list[tuple[int, ...]], int]:
    """Complete prompts given as rows of the model's own embedding, and say how many positions were loaded."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    table = load_file(BUNDLED / "base" / "model.safetensors")["model.embed_tokens.weight"]
    parameters = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    inputs = [{"prompt_embeds": scale * table[prompt]} for prompt in prompts]
    outputs = engine.llm.generate(inputs, parameters, use_tqdm=False)
    return [tuple(o.outputs[0].token_ids) for o in outputs], sum(o.num_cached_tokens or 0 for o in outputs)


def test_prompt_embeddings_on_the_chain(
    processes: Processes, models: Models, prompts: list[list[int]], store: Path
) -> None:
    """Equal ones hit, in the engine's own cache and from the tier; other ones, and tokens, never do."""
    same, other = partial(embed, prompts=prompts, scale=1.0), partial(embed, prompts=prompts, scale=-2.0)
    as_tokens = partial(generate, prompts=prompts, tokens=8)
    embeds = {"enable_prompt_embeds": True}
    alone = processes.run(replace(on_disk(models, store, **embeds), store=None), same, other, as_tokens).results
    one = processes.run(on_disk(models, store, **embeds), same, same, other, as_tokens, SETTLE).results
    again = processes.run(on_disk(models, store, **embeds), same, as_tokens).results
    fresh = partial(embed, prompts=prompts, scale=3.0)
    third = processes.run(on_disk(models, store, **embeds), fresh, other).results
    full = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    assert [answers[1] for answers in one[:3]] == [0, full, 0]
    assert loaded(one[3]) == 0
    assert again[0] == (alone[0][0], full)
    assert loaded(again[1]) == full
    assert [answers[1] for answers in third] == [0, full]
    assert [answers[0] for answers in one[:3]] == [alone[0][0], alone[0][0], alone[1][0]]
    assert tokens(one[3]) == tokens(alone[2]) == tokens(again[1])
    assert alone[0][0] != alone[1][0]
