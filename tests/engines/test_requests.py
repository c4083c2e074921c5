"""Requests of every shape: short and long, several at once, in chunks, preempted, with salts of all kinds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.engine import Answer, Engine, Launch
from tests.support.models import BLOCK, Models, loadable
from tests.support.processes import EngineDiedError, Processes
from tests.support.steps import generate, loaded, tokens

pytestmark = pytest.mark.engine

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 3 * BLOCK + 5)


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one by one", "all at once"])
def test_lengths_around_the_block_size(processes: Processes, models: Models, tmp_path: Path, one_by_one: bool) -> None:
    """Bound, each length loads exactly what it loads unbound, and answers as it does alone."""
    prompts = [models.random_prompt(length, seed=length) for length in LENGTHS]
    ask = partial(generate, prompts=prompts, tokens=8, one_by_one=one_by_one)
    isolated = processes.run(Launch(models.base, None, "off"), ask).results[0]
    given = {}
    for mode in ("off", "enforce"):
        # Stock dies of a prompt of one token: it counts -32 tokens to load.
        served = prompts[1:] if mode == "off" else prompts
        ask = partial(generate, prompts=served, tokens=8, one_by_one=one_by_one)
        store = tmp_path / mode
        store.mkdir()
        seeded = processes.run(Launch(models.base, store, mode), ask).results[0]
        read = processes.run(Launch(models.base, store, mode), ask).results[0]
        assert tokens(seeded) == tokens(read) == tokens(isolated)[-len(served) :]
        assert loaded(seeded) == 0
        given[mode] = [answer.loaded for answer in read]
    assert given["enforce"][1:] == given["off"]
    # A prompt of one token more than whole blocks is stored under another name than it is looked up, in stock too.
    assert given["enforce"] == [0 if n % BLOCK == 1 else loadable(n) for n in LENGTHS]
    assert sum(given["enforce"]) > 0


def test_with_a_local_prefix_cache_that_holds_more_than_the_store(
    processes: Processes, models: Models, store: Path
) -> None:
    """Stock counts from the start of the prompt and goes negative here."""
    prompt = models.random_prompt(BLOCK + 1)
    short = models.random_prompt(5, seed=1)
    ask = partial(generate, prompts=[short, prompt], tokens=4, one_by_one=True)
    run = processes.run(Launch(models.base, store, args={"enable_prefix_caching": True}), ask, ask)
    assert tokens(run.results[0]) == tokens(run.results[1])
    assert [answer.loaded for answer in run.results[1]] == [0, BLOCK]


@pytest.fixture(scope="module")
def long_prompts(models: Models) -> list[list[int]]:
    return [models.random_prompt(200, seed=seed) for seed in range(4)]


CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}


def test_chunked_prefill_stores_no_part_under_the_name_of_the_whole(
    processes: Processes, models: Models, store: Path, long_prompts: list[list[int]]
) -> None:
    ask = partial(generate, prompts=long_prompts, tokens=8)
    isolated = processes.run(Launch(models.base, None, "off", args=CHUNKS), ask).results[0]
    in_chunks = processes.run(Launch(models.base, store, args=CHUNKS), ask)
    assert tokens(in_chunks.results[0]) == tokens(isolated)
    assert list(store.iterdir()) == []
    assert "bypasses the shared tier: chunked prefill" in in_chunks.log
    # One that prefills at once stores, and one that prefills in chunks then reads that.
    whole = processes.run(Launch(models.base, store), ask).results[0]
    assert loaded(whole) == 0
    chunked = processes.run(Launch(models.base, store, args=CHUNKS), ask).results[0]
    assert loaded(chunked) == sum(loadable(len(prompt)) for prompt in long_prompts)
    assert tokens(chunked) == tokens(isolated)


def test_stock_stores_parts_that_kill_the_reader(
    processes: Processes, models: Models, store: Path, long_prompts: list[list[int]]
) -> None:
    """What the test above is about."""
    ask = partial(generate, prompts=long_prompts, tokens=8)
    processes.run(Launch(models.base, store, "off", args=CHUNKS), ask)
    assert list(store.iterdir())
    with pytest.raises(EngineDiedError):
        processes.run(Launch(models.base, store, "off"), ask)


# Room for two of the four requests when they are fully grown: the others are preempted and resume.
TIGHT = {"num_gpu_blocks_override": 24, "max_num_seqs": 4, "max_num_batched_tokens": 1024}


def count_preemptions(engine: Engine, **request: object) -> tuple[list[Answer], int]:
    answers = engine.generate(**request)  # type: ignore[arg-type]
    return answers, int(sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"))


@pytest.mark.parametrize("warm", [False, True], ids=["cold store", "warm store"])
def test_preempted_requests_resume_with_the_right_state(
    processes: Processes, models: Models, store: Path, warm: bool
) -> None:
    prompts = [models.random_prompt(100, seed=seed) for seed in range(4)]
    ask = partial(count_preemptions, prompts=prompts, tokens=200)
    isolated, _ = processes.run(Launch(models.base, None, "off"), ask).results[0]
    if warm:
        processes.run(Launch(models.base, store), partial(generate, prompts=prompts, tokens=1))
    answers, preemptions = processes.run(Launch(models.base, store, args=TIGHT), ask).results[0]
    assert preemptions > 0
    assert tokens(answers) == tokens(isolated)
    assert (loaded(answers) > 0) is warm
    # What was stored meanwhile is whole: a calm engine reads it in full.
    calm, _ = processes.run(Launch(models.base, store), ask).results[0]
    assert loaded(calm) == sum(loadable(len(prompt)) for prompt in prompts)
    assert tokens(calm) == tokens(isolated)


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (None, None, True),
        ("tenant", "tenant", True),
        ("tenant", "other", False),
        ("tenant", None, False),
        (None, "tenant", False),
        ("", None, True),  # vLLM's own prefix cache takes an empty salt for none
        ("None", None, False),
        ("None", "None", True),
        ("kvprov", "kvprov ", False),
        ("\u00e9", "e\u0301", False),  # one glyph, two strings
    ],
)
def test_salts(
    processes: Processes, models: Models, store: Path, first: str | None, second: str | None, shares: bool
) -> None:
    prompts = models.prompts(2)
    one, other = (partial(generate, prompts=prompts, salt=salt, tokens=1) for salt in (first, second))
    run = processes.run(Launch(models.base, store), one, one, other)
    full = sum(loadable(len(prompt)) for prompt in prompts)
    assert [loaded(answers) for answers in run.results] == [0, full, full if shares else 0]
    warned = "requests carry cache salts and there is no fleet secret" in run.log
    assert warned is bool(first or second)
    assert run.log.count("there is no fleet secret") <= 1


def test_vllm_takes_an_empty_salt_for_none(processes: Processes, models: Models) -> None:
    prompts = models.prompts(2)
    steps = [partial(generate, prompts=prompts, salt=salt, tokens=1, one_by_one=True) for salt in (None, "", "None")]
    run = processes.run(Launch(models.base, None, "off", args={"enable_prefix_caching": True}), *steps)
    full = sum(loadable(len(prompt)) for prompt in prompts)
    assert [loaded(answers) for answers in run.results] == [0, full, 0]


def test_a_rotated_secret_leaves_salted_entries_cold_and_unsalted_ones_warm(
    processes: Processes, models: Models, store: Path, tmp_path: Path
) -> None:
    def secret(name: str) -> dict[str, str]:
        file = tmp_path / name
        file.write_text(f"{name} is a secret of sixteen bytes and more")
        file.chmod(0o600)
        return {"KVPROV_SECRET_FILE": str(file)}

    prompts = models.prompts(2)
    salted, unsalted = (partial(generate, prompts=prompts, salt=salt, tokens=1) for salt in ("tenant", None))
    full = sum(loadable(len(prompt)) for prompt in prompts)
    old, new = secret("old"), secret("new")
    seeded = processes.run(Launch(models.base, store, env=old), salted, unsalted)
    same = processes.run(Launch(models.base, store, env=old), salted, unsalted)
    rotated = processes.run(Launch(models.base, store, env=new), salted, unsalted)
    assert [loaded(answers) for answers in seeded.results] == [0, 0]
    assert [loaded(answers) for answers in same.results] == [full, full]
    assert [loaded(answers) for answers in rotated.results] == [0, full]
    assert "no fleet secret" not in seeded.log


@pytest.mark.parametrize("salt", [5, ["x"], b"a"])
def test_a_salt_that_is_no_text_bypasses(processes: Processes, models: Models, store: Path, salt: object) -> None:
    """Within one process nothing checks a salt's type. Stock answers, and so does a bound engine."""
    prompts = models.prompts(1)
    ask = partial(generate, prompts=prompts, salt=salt, tokens=1)
    run = processes.run(Launch(models.base, store), ask, ask, timeout=60)
    assert [loaded(answers) for answers in run.results] == [0, 0]
    assert list(store.iterdir()) == []
    assert "sharing_domain: the salt is not text" in run.log
