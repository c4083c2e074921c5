"""Requests under way beneath which weights or an adapter are exchanged, and what engines read afterwards.

What is right is what an engine says that goes through the same exchanges without a tier.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.engine import Adapter, Answer, Engine, Launch
from tests.support.models import BLOCK, BUNDLED, Models
from tests.support.processes import Processes, Step

CHUNK = 64
GROWS = 200
"""How many tokens the requests generate that drive each other out of a cache that is too small for both."""

ARGS: dict[str, Any] = {
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 2,
    # Two requests of 100 tokens fit, but not when they have grown.
    "num_gpu_blocks_override": 17,
}

STAGES = ("old weights", "old weights, other adapter", "new weights", "new weights, other adapter")
"""What is asked of the store afterwards, in this order."""


@dataclass(frozen=True)
class Scene:
    """Two checkpoints, and a tenant's adapter that is exchanged for another under one name, number and path.

    Attributes:
        old: The checkpoint that engines are started with.
        new: Another one.
        folder: The adapter's.
        finished: Prompts of requests that are done at the first exchange.
        running: One whose prefill is half done then.
        waiting: One that has not been computed at all.
        growing: Two of which one has been preempted at the second exchange, back to the old weights.
        adapted: Three as the first three, at the third exchange, that of the adapter.
    """

    old: str
    new: str
    folder: Path
    finished: list[list[int]]
    running: list[int]
    waiting: list[int]
    growing: list[list[int]]
    adapted: list[list[int]]

    @property
    def prompts(self) -> list[list[int]]:
        return [*self.finished, self.running, self.waiting, *self.growing, *self.adapted]


def scene(models: Models, folder: Path) -> Scene:
    """Make a scene in `folder`."""
    new = models.copy_base(folder / "new")
    models.perturb(Path(new))
    prompt = models.random_prompt
    return Scene(
        models.base,
        new,
        folder / "tenant",
        finished=[prompt(100, 1)],
        running=prompt(200, 2),
        waiting=prompt(100, 3),
        growing=[prompt(100, 4), prompt(100, 5)],
        adapted=[prompt(100, 6), prompt(200, 7), prompt(100, 8)],
    )


def put(policy: str, folder: Path) -> None:
    """Exchange what is in the tenant's folder."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.copytree(BUNDLED / "adapters" / policy, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def exchange_weights(engine: Engine, path: str) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def exchange_adapter(engine: Engine, policy: str, folder: Path) -> None:
    from vllm.lora.request import LoRARequest

    put(policy, folder)
    engine.llm.llm_engine.add_lora(LoRARequest("tenant", 1, str(folder), load_inplace=True))


@dataclass
class Witness:
    """What became of the requests under way, so that a test can see that the exchanges took place beneath them.

    Attributes:
        computed: Tokens that each had computed when something was exchanged.
        status: Its state then.
        generated: What the growing ones generated.
        held: Lists of hashes as requests had them at an exchange, and what these held: whoever had been handed one
            before, such as a store under way in another thread, must find in it what it was handed.
    """

    computed: dict[str, int] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    generated: dict[str, list[int]] = field(default_factory=dict)
    held: list[tuple[list[bytes], list[bytes]]] = field(default_factory=list)

    def keeps_what_was_handed_out(self) -> bool:
        return bool(self.held) and all(now[: len(then)] == then for now, then in self.held)


class _Drive:
    """Adds requests and steps an engine, as its own loop does."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        self.engine, self.witness = engine, Witness()
        self._llm = engine.llm.llm_engine
        self._lora = LoRARequest("tenant", 1, str(folder))

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        self._llm.add_request(name, {"prompt_token_ids": prompt}, parameters, lora_request=self._lora)

    def step(self) -> None:
        for output in self._llm.step():
            self.witness.generated[output.request_id] = list(output.outputs[0].token_ids)

    def look(self) -> dict[str, str]:
        """Note where each request is, and return their states."""
        found = {}
        for request in self.engine.core.scheduler.requests.values():
            name = request.request_id.rsplit("-", 1)[0] if "-" in request.request_id else request.request_id
            self.witness.computed[name] = request.num_computed_tokens
            self.witness.status[name] = found[name] = request.status.name
        return found

    def hold(self) -> None:
        """Note what others have been handed of the requests."""
        requests = self.engine.core.scheduler.requests.values()
        self.witness.held += [(r.block_hashes, list(r.block_hashes)) for r in requests]

    def finish(self) -> None:
        while self._llm.has_unfinished_requests():
            self.step()


def write(engine: Engine, *, scene: Scene, settle: float) -> Witness:
    """Let requests run into each exchange, with what they store going to the engine's tier."""
    put("standard", scene.folder)
    drive = _Drive(engine, scene.folder)

    def half_way(prompts: list[list[int]], prefix: str) -> None:
        done, running, waiting = prompts
        drive.add(f"{prefix}finished", done, 1)
        drive.finish()
        drive.add(f"{prefix}running", running, 8)
        drive.add(f"{prefix}waiting", waiting, 8)
        while drive.look().get(f"{prefix}running") != "RUNNING" or drive.witness.computed[f"{prefix}running"] < CHUNK:
            drive.step()
        drive.hold()

    half_way([scene.finished[0], scene.running, scene.waiting], "")
    exchange_weights(engine, scene.new)
    drive.finish()

    for number, prompt in enumerate(scene.growing):
        drive.add(f"growing{number}", prompt, GROWS)
    while "PREEMPTED" not in drive.look().values():
        drive.step()
    drive.hold()
    exchange_weights(engine, scene.old)
    drive.finish()

    half_way(scene.adapted, "adapted ")
    exchange_adapter(engine, "inverted", scene.folder)
    drive.finish()
    # What was deferred to the next step is done in one, and the rest settles.
    engine.generate([[11, 12, 13]], tokens=1)
    time.sleep(settle)
    return drive.witness


def read(engine: Engine, *, scene: Scene, prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """Ask the same under each combination of weights and adapter."""
    answers = {}
    put("standard", scene.folder)
    tenant = Adapter("tenant", 1, str(scene.folder))

    def ask() -> list[Answer]:
        return engine.generate(prompts, adapter=tenant, tokens=4, one_by_one=True)

    for stage in STAGES:
        if stage == "new weights":
            exchange_weights(engine, scene.new)
        exchange_adapter(engine, "inverted" if "adapter" in stage else "standard", scene.folder)
        answers[stage] = ask()
    return answers


@dataclass(frozen=True)
class Exchanged:
    """A scene that was played.

    Attributes:
        witness: Of the engine that went through the exchanges.
        read: What a fresh engine gets of the store, by stage.
        right: What an engine says without a store.
        prompts: What was asked: the scene's prompts, and the growing ones with what they generated.
    """

    witness: Witness
    read: dict[str, list[Answer]]
    right: dict[str, list[Answer]]
    prompts: dict[str, list[int]]

    def loaded(self, stage: str) -> dict[str, int]:
        """Return how many tokens were loaded of each prompt."""
        return {name: answer.loaded for name, answer in zip(self.prompts, self.read[stage], strict=True)}

    def expected(self, stage: str) -> dict[str, tuple[int, int]]:
        """Return how many tokens of each prompt may be loaded, at least and at most."""
        whole = {name: (_blocks(len(prompt) - 1),) * 2 for name, prompt in self.prompts.items()}
        given = {
            "old weights": {
                "finished": whole["finished"],
                "running": (CHUNK, CHUNK),
                # It was preempted with the other weights, and computed again from the start.
                "growing1": (_blocks(self.prompt), whole["growing1"][1]),
                "adapted finished": whole["adapted finished"],
                "adapted running": (CHUNK, CHUNK),
            },
            "old weights, other adapter": {"adapted waiting": whole["adapted waiting"]},
            "new weights": {
                "waiting": whole["waiting"],
                "growing0": (_blocks(self.prompt), _blocks(self.witness.computed["growing0"])),
                "growing1": (_blocks(self.prompt), _blocks(self.witness.computed["growing0"])),
            },
            "new weights, other adapter": {},
        }[stage]
        return dict.fromkeys(self.prompts, (0, 0)) | given

    @property
    def prompt(self) -> int:
        """How many tokens the growing requests had at first."""
        return len(self.prompts["finished"])

    def unexpected(self, stage: str) -> dict[str, int]:
        """Return what was loaded that should not have been, or was not that should."""
        expected = self.expected(stage)
        return {n: count for n, count in self.loaded(stage).items() if not expected[n][0] <= count <= expected[n][1]}

    def took_place(self) -> bool:
        """Whether each exchange was made beneath requests in all states."""
        computed, status = self.witness.computed, self.witness.status
        return (
            computed["running"] == computed["adapted running"] == CHUNK
            and computed["waiting"] == computed["adapted waiting"] == computed["growing1"] == 0
            and status["growing1"] == "PREEMPTED"
            and computed["growing0"] > self.prompt
        )


def named(scene: Scene, witness: Witness) -> dict[str, list[int]]:
    """Return what is asked afterwards: the prompts, and those of the growing requests with what these generated."""
    names = ["finished", "running", "waiting", "growing0", "growing1"]
    names += [f"adapted {name}" for name in ("finished", "running", "waiting")]
    prompts = dict(zip(names, scene.prompts, strict=True))
    return prompts | {name: prompts[name] + witness.generated[name] for name in ("growing0", "growing1")}


def play(processes: Processes, scene: Scene, launch: Launch, settle: float) -> Exchanged:
    """Let one engine go through the exchanges, and a fresh one read what it stored.

    Args:
        processes: Starts engines.
        scene: What they do.
        launch: How they are started, but for `ARGS`.
        settle: Seconds until all that an engine wrote is there to be read.
    """
    writer = replace(launch, args={**launch.args, **ARGS})
    witness = processes.run(writer, partial(write, scene=scene, settle=settle)).results[0]
    prompts = named(scene, witness)
    ask: Step = partial(read, scene=scene, prompts=list(prompts.values()))
    # One after the other: both exchange the tenant's files.
    right = processes.run(Launch(scene.old, None, "off"), ask).results[0]
    got = processes.run(launch, ask).results[0]
    return Exchanged(witness, got, right, prompts)


def _blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK
