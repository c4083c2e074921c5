"""What once went around the binding: writes that nobody saw, memory that was another's, hooks, names of folders."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.packages import install
from tests.support.processes import EngineDiedError
from tests.support.sglang.engine import PAGE, Engine, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.plugins import GROUP
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import call, generate, stored, written

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def prompt(models: LongModels) -> list[int]:
    return models.random_prompt(200, seed=21)


def write_directly(engine: Engine, *, name: str) -> None:
    """Exchange one parameter past the model's own `load_weights`."""
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    from tests.support.sglang.engine import _Update

    held = torch.tensor(engine.engine.get_weights_by_name(name, 1000)).to(torch.bfloat16)
    wanted = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=engine.engine._serialize_tensors_per_rank([(name, -held)], None),
        load_format="direct",
        flush_cache=False,
    )
    with _Update(engine.engine):
        manager = engine.engine.tokenizer_manager
        success, message = engine.engine.loop.run_until_complete(manager.update_weights_from_tensor(wanted, None))
    assert success, message


def overwrite_for_a_check(engine: Engine) -> None:
    """Overwrite all weights, as trainers' tests do, to see later that an update brings them all."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    manager = engine.engine.tokenizer_manager
    success, message, *_ = engine.engine.loop.run_until_complete(
        manager.check_weights(CheckWeightsReqInput(action="reset_tensors"), None)
    )
    assert success, message


@pytest.mark.parametrize(
    "change", [partial(write_directly, name="model.layers.0.input_layernorm.weight"), overwrite_for_a_check],
    ids=["direct", "check"],
)  # fmt: skip
def test_weights_that_were_changed_unseen_are_not_known(
    processes: Processes, models: LongModels, prompt: list[int], store: Path, change: Any
) -> None:
    other = models.random_prompt(200, seed=22)
    ask, ask_other = partial(generate, prompts=[prompt]), partial(generate, prompts=[other])
    back = partial(call, method="update_from_disk", path=models.base, flush_cache=False)
    run = processes.run(Launch(models.base, store), ask, written, change, ask, ask_other, written, back, ask, ask_other)
    before, pages, _, changed, _, pages_after, _, known, _ = run.results
    # The control: the engine stores, and the change counts.
    assert pages == len(prompt) // PAGE
    assert changed[0].logprobs != before[0].logprobs
    # It reads nothing that the former weights computed, and what it computes is not kept as theirs.
    assert changed[0].cached == 0
    assert pages_after == pages
    # After an update from disk all is known again.
    assert known[0].cached == loadable(len(prompt))
    assert known[0].logprobs == pytest.approx(before[0].logprobs, abs=1e-4)


def vocabulary_adapter(models: LongModels, folder: Path, *, embeds: bool) -> str:
    """Make an adapter with parts for the embedding, or with parts for the head that change nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    source = Path(models.adapter("inverted").path)
    tensors = load_file(source / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    model = json.loads((Path(models.base) / "config.json").read_text())
    vocabulary, width, rank = model["vocab_size"], model["hidden_size"], config["r"]
    kind = next(iter(tensors.values())).dtype
    generator = torch.Generator().manual_seed(3)
    prefix = "base_model.model.model.embed_tokens.lora_embedding" if embeds else "base_model.model.lm_head.lora"
    suffix, shapes = (
        ("", ((rank, vocabulary), (width, rank))) if embeds else (".weight", ((rank, width), (vocabulary, rank)))
    )
    for part, shape in zip("AB", shapes, strict=True):
        tensors[f"{prefix}_{part}{suffix}"] = (torch.randn(shape, generator=generator) * embeds).to(kind)
    config["target_modules"] = ["q_proj", "v_proj", "embed_tokens" if embeds else "lm_head"]
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_what_another_adapter_left_in_memory_reaches_nobody(
    processes: Processes, models: LongModels, prompt: list[int], store: Path, tmp_path: Path
) -> None:
    """SGLang clears an adapter's place in memory only in part: see `adapters._takes_over_embeddings`."""
    adapters = {
        "attacker": vocabulary_adapter(models, tmp_path / "embeds", embeds=True),
        "victim": vocabulary_adapter(models, tmp_path / "head", embeds=False),
    }
    modules = ["q_proj", "v_proj", "embed_tokens", "lm_head"]
    args = {"lora_target_modules": modules, "max_loras_per_batch": 1}
    attacker, victim = (partial(generate, prompts=[prompt], adapter=name) for name in adapters)
    launch = Launch(models.base, store, adapters=adapters, args=args)
    run = processes.run(launch, victim, attacker, written, victim, written)
    alone, _, pages, after, pages_after = run.results
    # The control: in SGLang, one adapter is computed with parts of another. One that has its own parts is stored.
    assert after[0].logprobs != pytest.approx(alone[0].logprobs, abs=1e-3)
    assert after[0].cached == 0
    assert pages == pages_after == len(prompt) // PAGE
    assert "bypasses the shared tier: adapter" in run.log
    # Where nobody has parts for the embedding, such an adapter is as good as any.
    heads = Launch(
        models.base,
        store,
        adapters={"victim": adapters["victim"]},
        args={"lora_target_modules": ["q_proj", "v_proj", "lm_head"]},
    )
    processes.run(heads, victim, written)
    [shared] = processes.run(heads, victim).results
    assert stored(shared) == loadable(len(prompt))
    assert shared[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-3)


REPLACES = '''
"""Somebody else's plugin, which registers a hook as SGLang provides for it."""

import os


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(*args, **kwargs):
        return None

    HookRegistry.register(os.environ["TEST_TARGET"], hook, HookType[os.environ["TEST_KIND"]])
'''
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def test_a_hook_that_replaces_a_seam_stops_the_engine(processes: Processes, models: LongModels, tmp_path: Path) -> None:
    package = install(tmp_path / "package", "replaces", REPLACES, {"replaces": "register"}, group=GROUP)

    def run(kind: str, target: str) -> str:
        env = {"TEST_KIND": kind, "TEST_TARGET": target}
        return processes.run(Launch(models.base, env=env, path=(package,))).log

    # A hook that runs beside a seam does no harm.
    assert "kvprov: mode=enforce" in run("BEFORE", f"{UPDATER}.update_weights_from_disk")
    for target, seam in {
        f"{UPDATER}.update_weights_from_disk": f"{UPDATER}.update_weights_from_disk",
        # By another name of the class.
        "sglang.srt.managers.scheduler.Req.init_next_round_input": (
            "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
        ),
    }.items():
        with pytest.raises(EngineDiedError) as raised:
            run("REPLACE", target)
        assert f"Something replaced {seam}" in raised.value.log


def test_the_served_length_and_the_checkpoints_folder_do_not_separate(
    processes: Processes, models: LongModels, prompt: list[int], store: Path, tmp_path: Path
) -> None:
    ask = partial(generate, prompts=[prompt])
    # Types of rotary embeddings for which the length counts are called that.
    folder = models.copy_base(tmp_path / "dynamic" / "base")
    [_, pages] = processes.run(Launch(models.base, store), ask, written).results
    assert pages == len(prompt) // PAGE
    [shared] = processes.run(Launch(folder, store, args={"context_length": 1024}), ask).results
    assert stored(shared) == loadable(len(prompt))
    rotary = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}}
    dynamic = {"json_model_override_args": json.dumps(rotary)}
    processes.run(Launch(models.base, store, args=dynamic), ask, written)
    [same] = processes.run(Launch(models.base, store, args=dynamic), ask).results
    [shorter] = processes.run(Launch(models.base, store, args=dynamic | {"context_length": 1024}), ask).results
    assert stored(same) == loadable(len(prompt))
    assert stored(shorter) == 0


def load_in_order(engine: Engine, *, name: str, folder: str, reverse: bool) -> None:
    """Load an adapter of which two tensors have one place, from tensors, in the order of their names or the other."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    generator = torch.Generator().manual_seed(1)
    for part, shape in (("A", (config["r"], 128)), ("B", (128, config["r"]))):
        for module in ("self_attn", "other"):
            tensor = torch.randn(shape, generator=generator).to(torch.bfloat16) / 2
            tensors[f"base_model.model.model.layers.0.{module}.o_proj.lora_{part}.weight"] = tensor
    config["target_modules"] = ["q_proj", "v_proj", "o_proj"]
    ordered = dict(sorted(tensors.items(), reverse=reverse))
    assert engine.engine.load_lora_adapter_from_tensors(name, ordered, config).success


def test_the_order_of_tensors_does_not_change_what_an_adapter_does(
    processes: Processes, models: LongModels, prompt: list[int], store: Path
) -> None:
    args = {"enable_lora": True, "lora_target_modules": ["q_proj", "v_proj", "o_proj"]}
    load = partial(load_in_order, folder=models.adapter("inverted").path)
    steps = [
        step
        for name, reverse in (("one", False), ("two", True))
        for step in (partial(load, name=name, reverse=reverse), partial(generate, prompts=[prompt], adapter=name))
    ]
    answers = {
        mode: processes.run(Launch(models.base, store, mode, args=args), *steps).results for mode in ("off", "enforce")
    }
    _, one, _, two = answers["off"]
    # The control: in SGLang it does.
    assert one[0].tokens != two[0].tokens
    _, one, _, two = answers["enforce"]
    assert two[0].cached == loadable(len(prompt))
    assert two[0].tokens == one[0].tokens
    assert two[0].logprobs == pytest.approx(one[0].logprobs, abs=1e-3)
