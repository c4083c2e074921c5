"""Adapters by content: whatever they are called, wherever they lie, and whatever happens to their files meanwhile.

Every engine here runs a fleet's worker: it shares one store, and its own prefix cache where a test says so.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.support.engine import Adapter, Engine, Launch
from tests.support.models import BUNDLED, Models, loadable
from tests.support.processes import Processes
from tests.support.steps import generate, loaded, tokens

pytestmark = pytest.mark.engine


def put(policy: str, folder: Path) -> None:
    """Exchange what is in `folder` for an adapter, as a tenant does who replaces its files."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.copytree(BUNDLED / "adapters" / policy, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def do(_engine: Engine, *, policy: str, folder: Path) -> None:
    put(policy, folder)


def load(engine: Engine, *, adapter: Adapter) -> None:
    """What vLLM's HTTP server does on /v1/load_lora_adapter."""
    from vllm.lora.request import LoRARequest

    engine.llm.llm_engine.add_lora(
        LoRARequest(adapter.name, adapter.number, adapter.path, load_inplace=adapter.inplace)
    )


def load_by_rpc(engine: Engine, *, adapter: Adapter) -> None:
    """The same, around the engine: straight to the workers."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest(adapter.name, adapter.number, adapter.path, load_inplace=adapter.inplace)
    engine.llm.collective_rpc("add_lora", args=(request,))


@pytest.fixture(scope="module")
def isolated(processes: Processes, models: Models, prompts: list[list[int]]) -> dict[str, list[tuple[int, ...]]]:
    """The right answer of each adapter: computed alone, without tier and without kvprov."""
    run = processes.run(
        Launch(models.base, None, "off"),
        *(
            partial(generate, prompts=prompts, adapter=models.adapter(p, i))
            for i, p in enumerate(("standard", "inverted"), 1)
        ),
    )
    standard, inverted = (tokens(answers) for answers in run.results)
    assert standard != inverted
    return {"standard": standard, "inverted": inverted}


def test_one_instance_keeps_adapters_and_salts_apart_by_itself(
    processes: Processes, models: Models, prompts: list[list[int]], full: int
) -> None:
    """The control: without a tier, stock isolates what it later loses at the connector."""
    ask = partial(generate, prompts=prompts, one_by_one=True)
    run = processes.run(
        Launch(models.base, None, "off", args={"enable_prefix_caching": True}),
        partial(ask, adapter=models.adapter("standard", 1), salt="a"),
        partial(ask, adapter=models.adapter("standard", 1), salt="a"),
        partial(ask, adapter=models.adapter("inverted", 2), salt="a"),
        partial(ask, adapter=models.adapter("standard", 1), salt="b"),
        partial(ask, adapter=models.adapter("standard", 1)),
    )
    assert [loaded(answers) for answers in run.results] == [0, full, 0, 0, 0]


def test_the_same_bytes_share_under_another_folder_name_and_number(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    full: int,
    store: Path,
    tmp_path: Path,
    isolated: dict,
) -> None:
    renamed = models.adapter("inverted", 7, "renamed", tmp_path / "elsewhere")
    seeded = processes.run(
        Launch(models.base, store), partial(generate, prompts=prompts, adapter=models.adapter("inverted"))
    )
    assert loaded(seeded.results[0]) == 0
    other = processes.run(
        Launch(models.base, store),
        partial(generate, prompts=prompts, adapter=models.adapter("standard", 3)),
        partial(generate, prompts=prompts, adapter=renamed),
    )
    assert [loaded(answers) for answers in other.results] == [0, full]
    assert tokens(other.results[1]) == isolated["inverted"]


def test_the_engines_own_prefix_cache_goes_by_content_too(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path
) -> None:
    renamed = models.adapter("inverted", 7, "renamed", tmp_path / "elsewhere")
    steps = [
        partial(generate, prompts=prompts, one_by_one=True, adapter=adapter)
        for adapter in (
            models.adapter("inverted", 1),
            models.adapter("inverted", 1),
            renamed,
            models.adapter("standard", 2),
        )
    ]
    cache = {"enable_prefix_caching": True, "max_loras": 2}
    bound = processes.run(Launch(models.base, None, args=cache), *steps)
    stock = processes.run(Launch(models.base, None, "off", args=cache), *steps)
    assert [loaded(answers) for answers in bound.results] == [0, full, full, 0]
    # Stock goes by name and path: it loses the renamed one.
    assert [loaded(answers) for answers in stock.results] == [0, full, 0, 0]


@pytest.mark.parametrize("how", [load, load_by_rpc], ids=["engine", "collective_rpc"])
@pytest.mark.parametrize("local", [False, True], ids=["store", "store and prefix cache"])
def test_new_bytes_loaded_in_place_miss_and_old_bytes_hit_again(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    full: int,
    store: Path,
    tmp_path: Path,
    isolated: dict,
    how: object,
    local: bool,
) -> None:
    folder = tmp_path / "tenant"
    put("standard", folder)
    adapter = Adapter("tenant", 1, str(folder))
    inplace = Adapter("tenant", 1, str(folder), inplace=True)
    ask = partial(generate, prompts=prompts, adapter=adapter, one_by_one=True)
    run = processes.run(
        Launch(models.base, store, args={"enable_prefix_caching": local}),
        ask,
        ask,
        partial(do, policy="inverted", folder=folder),
        partial(how, adapter=inplace),  # type: ignore[arg-type]
        ask,
        ask,
        partial(do, policy="standard", folder=folder),
        partial(how, adapter=inplace),  # type: ignore[arg-type]
        ask,
    )
    first, again, _, _, exchanged, exchanged_again, _, _, restored = run.results
    assert (loaded(first), loaded(again)) == (0, full)
    assert loaded(exchanged) == 0
    assert tokens(exchanged) == isolated["inverted"]
    assert loaded(exchanged_again) == full
    assert loaded(restored) == full
    assert tokens(first) == tokens(again) == tokens(restored) == isolated["standard"]


def test_stock_serves_stale_state_after_loading_in_place(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    full: int,
    store: Path,
    tmp_path: Path,
    isolated: dict,
) -> None:
    """What the test above is about: without kvprov, the new adapter reads the old one's state."""
    folder = tmp_path / "tenant"
    put("standard", folder)
    adapter, inplace = (Adapter("tenant", 1, str(folder), inplace=flag) for flag in (False, True))
    ask = partial(generate, prompts=prompts, adapter=adapter)
    run = processes.run(
        Launch(models.base, store, "off"),
        ask,
        partial(do, policy="inverted", folder=folder),
        partial(load, adapter=inplace),
        ask,
    )
    assert loaded(run.results[3]) == full
    assert tokens(run.results[3]) != isolated["inverted"]


def test_a_request_may_ask_to_load_in_place(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    full: int,
    store: Path,
    tmp_path: Path,
    isolated: dict,
) -> None:
    folder = tmp_path / "tenant"
    put("standard", folder)
    inplace = Adapter("tenant", 1, str(folder), inplace=True)
    ask = partial(generate, prompts=prompts, adapter=inplace)
    run = processes.run(Launch(models.base, store), ask, ask, partial(do, policy="inverted", folder=folder), ask, ask)
    first, again, _, exchanged, exchanged_again = run.results
    assert [loaded(a) for a in (first, again, exchanged, exchanged_again)] == [0, full, 0, full]
    assert tokens(again) == isolated["standard"]
    assert tokens(exchanged) == tokens(exchanged_again) == isolated["inverted"]


@pytest.mark.parametrize("order", ["swap then evict", "evict then swap"])
def test_an_adapter_evicted_and_swapped_on_disk(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    full: int,
    store: Path,
    tmp_path: Path,
    isolated: dict,
    order: str,
) -> None:
    folder = tmp_path / "tenant"
    put("standard", folder)
    tenant = partial(generate, prompts=prompts, adapter=Adapter("tenant", 1, str(folder)))
    # With room for one adapter, any other one drives it out.
    evict = partial(generate, prompts=prompts[:1], adapter=models.adapter("inverted", 2), tokens=1)
    swap = partial(do, policy="inverted", folder=folder)
    between = [swap, evict] if order == "swap then evict" else [evict, swap]
    run = processes.run(
        Launch(models.base, store, args={"max_loras": 1, "max_cpu_loras": 1}),
        tenant,
        tenant,
        *between,
        tenant,
        tenant,
        evict,
        partial(do, policy="standard", folder=folder),
        tenant,
    )
    first, again, swapped, swapped_again, restored = (run.results[i] for i in (0, 1, 4, 5, 8))
    assert (loaded(first), loaded(again)) == (0, full)
    assert tokens(first) == isolated["standard"]
    # One prompt's state is that of the adapter which did the evicting: the same bytes, so it may be read.
    assert loaded(swapped) == loadable(len(prompts[0]))
    assert tokens(swapped) == isolated["inverted"]
    assert loaded(swapped_again) == full
    assert loaded(restored) == full
    assert tokens(restored) == isolated["standard"]


def test_an_adapter_swapped_on_disk_while_loaded_keeps_its_bytes_and_identity(
    processes: Processes,
    models: Models,
    prompts: list[list[int]],
    full: int,
    store: Path,
    tmp_path: Path,
    isolated: dict,
) -> None:
    """vLLM does not look at the files of an adapter that is loaded, and neither may its identity."""
    folder = tmp_path / "tenant"
    put("standard", folder)
    tenant = partial(generate, prompts=prompts, adapter=Adapter("tenant", 1, str(folder)))
    run = processes.run(Launch(models.base, store), tenant, partial(do, policy="inverted", folder=folder), tenant)
    assert loaded(run.results[2]) == full
    assert tokens(run.results[2]) == isolated["standard"]


def test_an_adapter_that_cannot_be_read_bypasses_and_still_answers(
    processes: Processes, models: Models, prompts: list[list[int]], store: Path, tmp_path: Path, isolated: dict
) -> None:
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    shutil.copytree(BUNDLED / "adapters" / "inverted", folder)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    ask = partial(generate, prompts=prompts, adapter=Adapter("pickled", 1, str(folder)), one_by_one=True)
    run = processes.run(Launch(models.base, store, args={"enable_prefix_caching": True}), ask, ask)
    assert [loaded(answers) for answers in run.results] == [0, 0]
    assert [tokens(answers) for answers in run.results] == [isolated["inverted"]] * 2
    assert list(store.iterdir()) == []
    assert "bypasses the shared tier: adapter: " in run.log


def exchange_while_running(engine: Engine, *, prompt: list[int], folder: Path) -> list[int]:
    """Let a request run, exchange its adapter beneath it, and return all its tokens."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    llm = engine.llm.llm_engine
    lora = LoRARequest("tenant", 1, str(folder))
    llm.add_request(
        "running",
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False),
        lora_request=lora,
    )
    for _ in range(100):
        llm.step()
    put("inverted", folder)
    llm.add_lora(LoRARequest("tenant", 1, str(folder), load_inplace=True))
    while llm.has_unfinished_requests():
        outputs = llm.step()
    return prompt + list(outputs[0].outputs[0].token_ids)


def test_an_adapter_exchanged_beneath_a_running_request(
    processes: Processes, models: Models, prompts: list[list[int]], store: Path, tmp_path: Path
) -> None:
    """What is computed after the exchange is neither adapter's state: nobody may read it."""
    folder = tmp_path / "tenant"
    prompt = prompts[0]

    def run(mode: str) -> list[int]:
        put("standard", folder)
        done = processes.run(
            Launch(models.base, None, mode, args={"enable_prefix_caching": True}),
            partial(exchange_and_reread, prompt=prompt, folder=folder),
        )
        return done.results[0]

    computed_before = (len(prompt) + 100) // 32 * 32
    stock, bound = run("off"), run("enforce")
    # Stock hands all of it to whoever comes under the same name and path.
    assert stock[0] > computed_before
    # Bound, the old bytes get what they computed, and the new ones nothing.
    assert 0 < bound[0] <= computed_before
    assert bound[1] == 0


def exchange_and_reread(engine: Engine, *, prompt: list[int], folder: Path) -> list[int]:
    """Return how much of the running request's sequence the old and the new bytes are then given."""
    sequence = exchange_while_running(engine, prompt=prompt, folder=folder)
    given = []
    for policy in ("standard", "inverted"):
        put(policy, folder)
        load(engine, adapter=Adapter("tenant", 1, str(folder), inplace=True))
        given.append(loaded(engine.generate([sequence], adapter=Adapter("tenant", 1, str(folder)), tokens=1)))
    return given


def test_the_modules_that_an_engine_applies_adapters_to_are_bound(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path
) -> None:
    """An engine that is told to apply adapters to other modules computes other state with the same bytes."""
    ask = partial(generate, prompts=prompts, adapter=models.adapter("inverted"))
    restricted = {"lora_target_modules": ["o_proj"]}
    isolated = processes.run(Launch(models.base, None, "off", args=restricted), ask).results[0]
    for mode in ("off", "enforce"):
        store = tmp_path / mode
        store.mkdir()
        processes.run(Launch(models.base, store, mode), ask)
        read = processes.run(Launch(models.base, store, mode, args=restricted), ask).results[0]
        assert loaded(read) == (full if mode == "off" else 0)
        assert (tokens(read) == tokens(isolated)) is (mode == "enforce")


def mixed(engine: Engine, *, prompts: list[list[int]], adapter: Adapter) -> None:
    """Let requests without an adapter share their batches with requests that have one."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    parameters = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
    lora = LoRARequest(adapter.name, adapter.number, adapter.path)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(2)]
    loras = [one for _ in prompts for one in (lora, None)]
    engine.llm.generate(requests, parameters, lora_request=loras, use_tqdm=False)


def test_state_of_mixed_batches_is_not_shared(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path
) -> None:
    """On CPU, vLLM 0.32 computes requests without an adapter with that of another one in their batch."""
    base = partial(generate, prompts=prompts, tokens=4)
    isolated = processes.run(Launch(models.base, None, "off"), base).results[0]
    mix = partial(mixed, prompts=prompts, adapter=models.adapter("inverted"))
    for mode in ("off", "enforce"):
        store = tmp_path / mode
        store.mkdir()
        processes.run(Launch(models.base, store, mode, args={"max_loras": 1}), mix)
        read = processes.run(Launch(models.base, store, mode), base).results[0]
        if mode == "off":
            # The control: stock stores what it computed wrongly, and hands it on.
            assert loaded(read) > 0
            assert read != isolated
        else:
            assert loaded(read) == 0
            assert read == isolated
