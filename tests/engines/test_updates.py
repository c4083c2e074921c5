"""Weights that change at run time, as trainers change them: which state is shared before, during and after.

Every scenario runs with the engine core in the same process and in one of its own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import weight_transfer
from tests.support.engine import Answer, Engine, Launch
from tests.support.models import Models
from tests.support.packages import install
from tests.support.processes import Processes, Run
from tests.support.steps import bypassed, call, generate, loaded, same

pytestmark = pytest.mark.engine

CORES = {"same process": {}, "own process": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
CORE = pytest.mark.parametrize("core", CORES)
TRANSFER = {"weight_transfer_config": {"backend": weight_transfer.BACKEND}}
RUN = {"KVPROV_WEIGHTS_RUN": "run-7"}


def rpc(engine: Engine, *, method: Any, **kwargs: Any) -> None:
    engine.llm.collective_rpc(method, kwargs=kwargs)


def start(engine: Engine) -> None:
    engine.llm.init_weight_transfer_engine({"init_info": {}})
    engine.llm.start_weight_update()


def update(engine: Engine, *, path: str) -> None:
    engine.llm.update_weights({"update_info": {"path": path}})


def finish(engine: Engine, *, version: str | None = None) -> None:
    engine.llm.finish_weight_update(weight_version=version)


def transfer(engine: Engine, *, path: str, version: str | None) -> None:
    start(engine)
    update(engine, path=path)
    finish(engine, version=version)


def declare(engine: Engine, *, version: str) -> None:
    engine.llm.update_weight_version(version)


def nap(engine: Engine, *, level: int) -> None:
    engine.llm.sleep(level)
    engine.llm.wake_up()


def negate(worker: Any) -> None:
    """What a trainer may do to a worker: here, to turn every weight around."""
    for parameter in worker.get_model().parameters():
        parameter.data.neg_()


def reload_by_function(worker: Any, path: str) -> None:
    worker.reload_weights(weights_path=path)


def count(_engine: Engine, *, store: Path) -> int:
    return len(list(store.iterdir()))


@pytest.fixture(scope="module")
def other(models: Models, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another checkpoint of the same model."""
    folder = tmp_path_factory.mktemp("other") / "model"
    models.copy_base(folder)
    models.perturb(folder)
    return str(folder)


@pytest.fixture(scope="module")
def isolated(processes: Processes, models: Models, other: str, prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """What engines without a tier answer, that were started with the first checkpoint, by what they hold now.

    "fresh" are those that were started with the other one. On CPU, vLLM 0.32 keeps the former output layer through a
    reload when it shares its tensor with the embedding, so their log probabilities differ; keys and values do not.
    """
    asks = partial(ask, prompts=prompts)
    moved, fresh = processes.run_all(
        [
            (Launch(models.base, None, "off"), [asks, partial(rpc, method="reload_weights", weights_path=other), asks]),
            (Launch(other, None, "off"), [asks]),
        ]
    )
    assert isinstance(moved, Run)
    assert isinstance(fresh, Run)
    answers = {models.base: moved.results[0], other: moved.results[2], "fresh": fresh.results[0]}
    # Else a stale read could not be told from an own one.
    assert not same(answers[models.base], answers[other])
    assert not same(answers[models.base], answers["fresh"])
    return answers


def ask(engine: Engine, *, prompts: list[list[int]]) -> list[Answer]:
    return generate(engine, prompts=prompts, tokens=8, one_by_one=True)


def launch(core: str, model: str, store: Path | None, **more: Any) -> Launch:
    """An engine with a local prefix cache: its stale blocks are as wrong as the store's."""
    args = {"enable_prefix_caching": True, **more.pop("args", {})}
    env = {**CORES[core], **more.pop("env", {})}
    return Launch(model, store, args=args, env=env, **more)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A package that brings the backend to every process of an engine, as a trainer's does."""
    source = "from tests.support.weight_transfer import register\n"
    folder = tmp_path_factory.mktemp("plugin")
    return (install(folder, "folder_transfer", source, {"folder": "register"}, "vllm.general_plugins"),)


@CORE
def test_reloaded_weights_are_known_by_their_content(
    processes: Processes,
    models: Models,
    other: str,
    store: Path,
    prompts: list[list[int]],
    full: int,
    isolated: dict[str, list[Answer]],
    core: str,
) -> None:
    """And rolling back to earlier bytes finds the earlier entries."""
    asks = partial(ask, prompts=prompts)
    reload = partial(rpc, method="reload_weights")
    run = processes.run(
        launch(core, models.base, store),
        asks,
        asks,
        partial(reload, weights_path=other),
        asks,
        asks,
        partial(reload, weights_path=models.base),
        asks,
        partial(nap, level=2),
        asks,
        partial(reload, weights_path=other),
        asks,
    )
    first, again, _, moved, settled, _, back, _, woken, _, reloaded = run.results
    assert [loaded(a) for a in (first, again, moved, settled, back)] == [0, full, 0, full, full]
    # After a sleep at level 2 the weights are gone, as far as vLLM promises; reloaded, they are known.
    assert [loaded(a) for a in (woken, reloaded)] == [0, full]
    assert same(first, isolated[models.base])
    assert same(back, isolated[models.base])
    assert same(moved, isolated[other])
    assert same(settled, isolated[other])
    assert same(reloaded, isolated[other])
    # Neither process ever loaded what the other one started with: content alone makes them meet.
    fresh = processes.run(launch("same process", other, store), asks).results[0]
    assert loaded(fresh) == full
    assert same(fresh, isolated["fresh"])


@CORE
def test_an_update_is_known_by_the_label_of_its_run(
    processes: Processes,
    models: Models,
    other: str,
    store: Path,
    prompts: list[list[int]],
    full: int,
    isolated: dict[str, list[Answer]],
    plugin: tuple[str, ...],
    core: str,
) -> None:
    asks = partial(ask, prompts=prompts)
    entries = partial(count, store=store)
    run = processes.run(
        launch(core, models.base, store, env=RUN, args=TRANSFER, path=plugin),
        partial(declare, version="0"),
        asks,
        asks,
        start,
        asks,
        partial(update, path=other),
        # Declared too early: more may arrive.
        partial(declare, version="1"),
        asks,
        entries,
        partial(finish, version="1"),
        asks,
        asks,
        partial(transfer, path=models.base, version="0"),
        asks,
        partial(transfer, path=other, version=None),
        asks,
        partial(bypassed, reason="weights"),
        entries,
    )
    _, first, again, _, started, _, _, early, during, _, moved, settled, _, back, _, unlabelled, bypasses, after = (
        run.results
    )
    assert [loaded(a) for a in (first, again)] == [0, full]
    assert [loaded(a) for a in (started, early)] == [0, 0]
    assert during == len(prompts)
    assert [loaded(a) for a in (moved, settled, back, unlabelled)] == [0, full, full, 0]
    assert same(moved, isolated[other])
    assert same(back, isolated[models.base])
    assert same(unlabelled, isolated[other])
    # While updating, after updating but before finishing, and after an update that nobody labelled.
    assert bypasses == 3 * len(prompts)
    assert after == 2 * len(prompts)
    assert re.search(r"kvprov: weights=label:run-7/1\b", run.log)
    # Another engine of the run, which never had these bytes in a file, and one of another run.
    same_run, other_run, no_run = processes.run_all(
        [
            (
                launch("same process", models.base, store, env=env, args=TRANSFER, path=plugin),
                [partial(transfer, path=other, version="1"), asks],
            )
            for env in (RUN, {"KVPROV_WEIGHTS_RUN": "run-8"}, {})
        ]
    )
    assert isinstance(same_run, Run)
    assert isinstance(other_run, Run)
    assert isinstance(no_run, Run)
    assert [loaded(r.results[1]) for r in (same_run, other_run, no_run)] == [full, 0, 0]
    for reader in (same_run, other_run, no_run):
        assert same(reader.results[1], isolated[other])
    assert "KVPROV_WEIGHTS_RUN does not say of which run" in no_run.log


@pytest.mark.parametrize("core", ["same process"])
def test_what_may_have_changed_more_than_weights_needs_a_label(
    processes: Processes, models: Models, other: str, store: Path, prompts: list[list[int]], full: int, core: str
) -> None:
    """A trainer's own methods have names that nobody can list: so all but those known to keep weights count."""
    asks = partial(ask, prompts=prompts)
    run = processes.run(
        launch(core, models.base, store, env=RUN | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}),
        asks,
        asks,
        partial(rpc, method=negate),
        asks,
        asks,
        # It restores the weights, but not whatever else the function may have changed.
        partial(rpc, method="reload_weights", weights_path=models.base),
        asks,
        partial(rpc, method=reload_by_function, path=other),
        asks,
        partial(declare, version="9"),
        asks,
        asks,
        partial(declare, version="not a version"),
        asks,
    )
    results = [loaded(answers) for answers in run.results if answers]
    # What cannot be a label is no word for what the weights are now.
    assert results == [0, full, 0, 0, 0, 0, 0, full, 0]
    assert "negate was called at run time" in run.log


@pytest.mark.parametrize("core", ["same process"])
def test_a_part_of_the_weights_is_not_the_whole(
    processes: Processes, models: Models, other: str, store: Path, prompts: list[list[int]], tmp_path: Path, core: str
) -> None:
    """vLLM only warns of tensors that are not there, and keeps the ones it had."""
    from safetensors.torch import load_file, save_file

    part = tmp_path / "part"
    models.copy_base(part)
    tensors = load_file(Path(other) / "model.safetensors")
    half = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    assert 0 < len(half) < len(tensors)
    save_file(half, part / "model.safetensors", metadata={"format": "pt"})
    asks = partial(ask, prompts=prompts)
    run = processes.run(
        launch(core, models.base, store),
        asks,
        partial(rpc, method="reload_weights", weights_path=str(part)),
        asks,
        asks,
    )
    assert [loaded(run.results[i]) for i in (0, 2, 3)] == [0, 0, 0]
    assert "it is not known whether all weights were reloaded" in run.log


def load_directly(engine: Engine, *, path: str) -> None:
    """What trainers do that share the engine's process. On CPU, vLLM has packed the larger tensors: not these."""
    from safetensors.torch import load_file

    tensors = load_file(Path(path) / "model.safetensors")
    model = engine.core.model_executor.driver_worker.worker.get_model()
    model.load_weights((name, tensor) for name, tensor in tensors.items() if "norm" in name or "embed" in name)


def test_weights_given_to_the_model_itself_are_noticed(
    processes: Processes, models: Models, other: str, store: Path, prompts: list[list[int]], full: int
) -> None:
    asks = partial(ask, prompts=prompts)
    steps = [
        asks,
        asks,
        partial(load_directly, path=other),
        asks,
        asks,
        partial(declare, version="3"),
        asks,
        asks,
        # Declared before the next request comes: the load is noticed all the same.
        partial(load_directly, path=models.base),
        partial(declare, version="4"),
        asks,
        partial(load_directly, path=other),
        asks,
    ]
    run = processes.run(launch("same process", models.base, store, env=RUN), *steps)
    alone = processes.run(Launch(models.base, None, "off"), *steps)
    answers = [result for result in run.results if result]
    isolated = [result for result in alone.results if result]
    assert [loaded(a) for a in answers] == [0, full, 0, 0, 0, full, 0, 0]
    assert all(same(a, b) for a, b in zip(answers, isolated, strict=True))
    assert not same(isolated[0], isolated[-1])
    assert "the model's load_weights was called at run time" in run.log


def register_scaling() -> None:
    from tests.support import loaders

    assert loaders.Scaling


def reload_by_iterator(engine: Engine, *, path: str) -> None:
    """Read files through vLLM's loader, and give the model something else."""
    from vllm.model_executor.model_loader import get_model_loader

    worker = engine.core.model_executor.driver_worker.worker
    config = copy.copy(worker.model_config)
    config.model = path
    read = get_model_loader(worker.vllm_config.load_config).get_all_weights(config, worker.get_model())
    changed = ((name, tensor * 0.5 if "norm" in name else tensor) for name, tensor in read)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": changed})


def refuse(engine: Engine, *, call: Callable[[Engine], None]) -> str:
    try:
        call(engine)
    except Exception as error:  # noqa: BLE001 - vLLM raises many kinds
        return type(error).__name__
    return ""


def test_weights_that_are_not_what_was_read_have_no_identity(
    processes: Processes, models: Models, store: Path, prompts: list[list[int]], full: int
) -> None:
    asks = partial(ask, prompts=prompts)
    honest, transformed = processes.run_all(
        [
            (
                launch("same process", models.base, store),
                [asks, asks, partial(reload_by_iterator, path=models.base), asks, asks],
            ),
            (Launch(models.base, store, args={"load_format": "scaling"}, before=register_scaling), [asks, asks]),
        ]
    )
    assert isinstance(honest, Run)
    assert isinstance(transformed, Run)
    assert [loaded(honest.results[i]) for i in (0, 1, 3, 4)] == [0, full, 0, 0]
    assert "they were given by an iterator" in honest.log
    assert [loaded(answers) for answers in transformed.results] == [0, 0]
    assert "the loader Scaling is not followed" in transformed.log


def test_an_engine_without_weights_at_first_is_known_after_a_reload(
    processes: Processes, models: Models, store: Path, prompts: list[list[int]], full: int
) -> None:
    """As trainers start engines: with dummy weights, which are declared, exchanged and reloaded."""
    asks = partial(ask, prompts=prompts)
    processes.run(launch("same process", models.base, store), asks)
    run = processes.run(
        launch("same process", models.base, store, env=RUN, args={"load_format": "dummy"}),
        asks,
        partial(declare, version="1"),
        asks,
        asks,
        partial(load_directly, path=models.base),
        asks,
        partial(rpc, method="update_config", overrides={"load_config": {"load_format": "auto"}}),
        partial(rpc, method="reload_weights"),
        asks,
    )
    answers = [loaded(result) for result in run.results if result]
    assert answers == [0, 0, full, 0, full]


def test_what_fails_does_not_leave_the_engine_in_an_update(
    processes: Processes, models: Models, other: str, store: Path, prompts: list[list[int]], full: int
) -> None:
    asks = partial(ask, prompts=prompts)
    run = processes.run(
        launch("same process", models.base, store, env=RUN),
        asks,
        # There is no transfer configuration.
        partial(refuse, call=partial(rpc, method="start_weight_update")),
        asks,
        # vLLM cannot answer until it is repaired.
        partial(refuse, call=partial(rpc, method="reload_weights", weights_path=f"{other}-is-not-there")),
        partial(rpc, method="reload_weights", weights_path=models.base),
        asks,
    )
    first, no_start, started, no_reload, _, reloaded = run.results
    assert no_start
    assert no_reload
    assert [loaded(a) for a in (first, started, reloaded)] == [0, 0, full]


def across(engine: Engine, *, prompts: list[list[int]], change: Callable[[Engine], None], steps: int) -> list[int]:
    """Change the weights while one request runs and others wait, and return how many prompts were complete by then."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.llm.llm_engine.add_request(f"across-{number}", {"prompt_token_ids": prompt}, parameters)
    done: list[int] = []
    for _ in range(steps):
        done += [int(o.request_id.split("-")[1]) for o in engine.llm.llm_engine.step() if o.finished]
    change(engine)
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    return done


@pytest.mark.parametrize(
    ("core", "steps", "by"),
    [
        ("same process", 1, "reload"),
        ("same process", 8, "reload"),
        ("same process", 40, "reload"),
        ("same process", 40, "model"),
        ("own process", 8, "reload"),
    ],
)
def test_requests_across_an_update_store_what_computed_them(
    processes: Processes,
    models: Models,
    other: str,
    store: Path,
    isolated: dict[str, list[Answer]],
    prompts: list[list[int]],
    full: int,
    core: str,
    steps: int,
    by: str,
) -> None:
    """Whatever an engine of either checkpoint then finds in the store gives its own answers."""
    run = processes.run(
        launch(core, models.base, store, args={"max_num_seqs": 1, "enable_prefix_caching": False}),
        partial(
            across,
            prompts=prompts,
            change=partial(rpc, method="reload_weights", weights_path=other)
            if by == "reload"
            else partial(load_directly, path=other),
            steps=steps,
        ),
    )
    (done,) = run.results
    assert len(done) < len(prompts)
    asks = partial(ask, prompts=prompts)
    found = {}
    for checkpoint, name in ((models.base, models.base), (other, "fresh")):
        answers = processes.run(launch("same process", checkpoint, store), asks).results[0]
        assert same(answers, isolated[name])
        found[checkpoint] = loaded(answers)
    if by == "model":
        # What the trainer gave has no name: those that waited stored nothing, and no former state either.
        assert 0 < found[models.base] < full
        assert found[other] == 0
        return
    # Those that waited were computed by the new weights, and are found under their identity.
    assert found[other] > 0
    assert found[models.base] + found[other] <= full
    if core == "same process":
        # Each entry belongs to one: the request that was running when the weights changed had stored its prompt.
        assert found[models.base] + found[other] == full


def test_calls_that_keep_weights_change_nothing(
    processes: Processes, models: Models, store: Path, prompts: list[list[int]], full: int
) -> None:
    asks = partial(ask, prompts=prompts)
    run = processes.run(
        launch("same process", models.base, store),
        asks,
        partial(rpc, method="list_loras"),
        partial(rpc, method="reset_mm_cache"),
        partial(nap, level=1),
        partial(call, function=list),
        asks,
    )
    assert [loaded(run.results[i]) for i in (0, 5)] == [0, full]
    assert "requests bypass" not in run.log
