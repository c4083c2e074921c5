"""What tenants can try: forged namespaces, joined fields, adapters changed under the engine, sessions, events."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang.engine import Answer, Engine, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import flush, generate, stored

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def prompt(models: LongModels) -> list[int]:
    return models.random_prompt(200, seed=7)


def handles(engine: Engine) -> dict[str, str]:
    """Return the handles of the loaded adapters, which SGLang appends to a client's namespace."""
    registry = engine.engine.tokenizer_manager.lora_registry
    return {name: ref.lora_id for name, ref in registry._registry.items()}


def forged(engine: Engine, *, prompt: list[int]) -> Answer:
    """Ask the base model under an adapter's handle as one's own namespace."""
    [answer] = engine.generate([prompt], extra_key=handles(engine)["tenant"])
    return answer


@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_a_client_cannot_forge_an_adapters_namespace(
    processes: Processes, models: LongModels, prompt: list[int], store: Path, mode: str
) -> None:
    adapter = models.adapter("inverted").path
    ask = partial(generate, prompts=[prompt])
    run = processes.run(
        Launch(models.base, store, mode, adapters={"tenant": adapter}),
        *(partial(ask, adapter="tenant"), flush, partial(ask, adapter="tenant"), flush),
        partial(forged, prompt=prompt),
    )
    own, answer = run.results[2], run.results[-1]
    [base] = processes.run(Launch(models.base, mode="off"), ask).results
    assert stored(own) == loadable(len(prompt))
    if mode == "off":
        # The control: stock serves the base model's request with the tenant's state.
        assert answer.storage == loadable(len(prompt))
        assert answer.logprobs != base[0].logprobs
    else:
        assert answer.cached == 0
        assert answer.tokens == base[0].tokens
        assert answer.logprobs == pytest.approx(base[0].logprobs, abs=1e-4)


SPELLINGS: list[dict[str, str | None]] = [
    {"salt": None, "extra_key": None},
    {"salt": "a", "extra_key": None},
    {"salt": None, "extra_key": "a"},
    {"salt": "a", "extra_key": "b"},
    {"salt": "b", "extra_key": "a"},
    {"salt": "ab", "extra_key": None},
    {"salt": None, "extra_key": "ab"},
    {"salt": "a\0b", "extra_key": None},
    {"salt": "a|b", "extra_key": None},
    {"salt": "kvprov", "extra_key": None},
]
"""Salts and namespaces whose parts can be joined in several ways."""


def test_salts_and_namespaces_stay_apart(
    processes: Processes, models: LongModels, prompt: list[int], store: Path
) -> None:
    asks = [partial(generate, prompts=[prompt], tokens=2, **spelling) for spelling in SPELLINGS]
    first = processes.run(Launch(models.base, store), *itertools.chain(*((ask, flush) for ask in asks)))
    second = processes.run(Launch(models.base, store), *asks)
    assert [stored(answers) for answers in first.results[::2]] == [0] * len(asks)
    assert [stored(answers) for answers in second.results] == [loadable(len(prompt))] * len(asks)


def overwrite(engine: Engine, *, file: str, by: str) -> None:
    """Write another adapter's bytes into the file that an adapter was loaded from, in place."""
    del engine
    with Path(file).open("r+b") as target:
        target.write(Path(by).read_bytes())


def test_an_adapter_that_is_overwritten_stays_what_was_loaded(
    processes: Processes, models: LongModels, prompt: list[int], store: Path, tmp_path: Path
) -> None:
    tenant = Path(models.adapter("standard", folder=tmp_path / "tenant").path)
    other = Path(models.adapter("inverted").path) / "adapter_model.safetensors"
    file = tenant / "adapter_model.safetensors"
    assert file.stat().st_size == other.stat().st_size
    ask = partial(generate, prompts=[prompt], adapter="tenant")
    run = processes.run(
        Launch(models.base, store, adapters={"tenant": str(tenant)}),
        partial(overwrite, file=str(file), by=str(other)),
        *(ask, flush, ask),
    )
    _, cold, _, warm = run.results
    assert stored(cold) == 0
    assert stored(warm) == loadable(len(prompt))
    # The bytes that were there when it was loaded, under their own identity: another process agrees.
    honest = Launch(models.base, store, adapters={"tenant": models.adapter("standard").path})
    [fresh] = processes.run(honest, ask).results
    alone = Launch(models.base, mode="off", adapters={"tenant": models.adapter("standard").path})
    [reference] = processes.run(alone, ask).results
    assert stored(fresh) == loadable(len(prompt))
    for answers in (cold, warm, fresh):
        assert answers[0].tokens == reference[0].tokens
        assert answers[0].logprobs == pytest.approx(reference[0].logprobs, abs=1e-4)
    # Who loads what is there now is somebody else.
    [replaced] = processes.run(Launch(models.base, store, adapters={"tenant": str(tenant)}), ask).results
    assert stored(replaced) == 0


def test_a_mixed_batch_keeps_adapters_apart(
    processes: Processes, models: LongModels, prompt: list[int], store: Path
) -> None:
    """Requests of two adapters and of the base model that are computed together store what each would alone."""
    adapters = {name: models.adapter(name).path for name in ("standard", "inverted")}
    names = [None, "standard", "inverted"]
    step = partial(together, prompt=prompt, adapters=names)
    [mixed] = processes.run(Launch(models.base, store, adapters=adapters), step).results
    fresh = processes.run(
        Launch(models.base, store, adapters=adapters),
        *(partial(generate, prompts=[prompt], adapter=name) for name in names),
    )
    alone = processes.run(
        Launch(models.base, mode="off", adapters=adapters),
        *(partial(generate, prompts=[prompt], adapter=name) for name in names),
    )
    assert sum(answer.cached for answer in mixed) == 0
    for [answer], [reference] in zip(fresh.results, alone.results, strict=True):
        assert answer.storage == loadable(len(prompt))
        assert answer.tokens == reference.tokens
        assert answer.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


def together(engine: Engine, *, prompt: list[int], adapters: list[str | None]) -> list[Answer]:
    """Ask for one prompt with several adapters at a time."""
    import asyncio

    from sglang.srt.managers.io_struct import GenerateReqInput

    from tests.support.sglang.engine import answer

    async def go() -> list[Any]:
        wanted = [
            GenerateReqInput(
                input_ids=list(prompt),
                sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
                return_logprob=True,
                lora_path=adapter,
            )
            for adapter in adapters
        ]
        manager = engine.engine.tokenizer_manager
        return await asyncio.gather(*(anext(manager.generate_request(one, None)) for one in wanted))

    answers = [answer(output) for output in engine.engine.loop.run_until_complete(go())]
    engine.flush()
    return answers


def session(engine: Engine, *, turns: list[dict[str, Any]]) -> list[Any]:
    """Take turns in one streaming session, which hands its state on from each to the next."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    name = engine.engine.open_session(100_000, streaming=True)
    manager, answers = engine.engine.tokenizer_manager, []
    for turn in turns:
        request = GenerateReqInput(
            input_ids=turn["prompt"],
            sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            session_params={"id": name},
            lora_path=turn.get("adapter"),
            cache_salt=turn.get("salt"),
        )
        output = engine.engine.loop.run_until_complete(anext(manager.generate_request(request, None)))
        answers.append(list(output["output_ids"]))
    engine.engine.close_session(name)
    return answers


def session_and_history(engine: Engine, *, turns: list[dict[str, Any]]) -> tuple[list[int], Answer]:
    """Take turns in a session, and ask the base model for all of it."""
    [first, *_] = session(engine, turns=turns)
    asked = turns[0]["prompt"] + first + turns[1]["prompt"]
    [answer] = engine.generate([asked], tokens=2)
    return asked, answer


@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_a_session_that_changes_its_adapter_leaves_nothing_behind(
    processes: Processes, models: LongModels, mode: str
) -> None:
    # Without a store: with one, SGLang's scheduler ends at the second turn of a streaming session.
    first, second = models.random_prompt(96, seed=8), models.random_prompt(96, seed=9)
    adapters = {"tenant": models.adapter("inverted").path}
    launch = Launch(models.base, None, mode, adapters=adapters, args={"enable_streaming_session": True})
    honest = [{"prompt": first}, {"prompt": second}]
    mixed = [{"prompt": first, "adapter": "tenant"}, {"prompt": second}]
    [(_, own)] = processes.run(launch, partial(session_and_history, turns=honest)).results
    [(asked, read)] = processes.run(launch, partial(session_and_history, turns=mixed)).results
    [[alone]] = processes.run(Launch(models.base, mode="off"), partial(generate, prompts=[asked], tokens=2)).results
    # The first turn of an honest session is there for others; what a mixed one continued is not.
    assert own.cached == len(first)
    assert read.cached == 0
    assert read.tokens == alone.tokens
    assert read.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
