"""What an engine says and does when it starts: bound, off, or not at all."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprov.contract.dimensions import BUILT_IN
from kvprov.engines.vllm import connectors
from kvprov.engines.vllm.seams import all_seams
from kvprov.errors import BindingError
from tests.support import tamper
from tests.support.engine import Engine, Launch
from tests.support.models import Models
from tests.support.processes import EngineDiedError, Processes, Run
from tests.support.provenance import copied
from tests.support.steps import bypassed, call, complete_embeddings, generate, loaded, tokens

pytestmark = pytest.mark.engine

SECRET = "correct-horse-battery-staple"
EXPLICIT = {"kv_connector_module_path": "kvprov.engines.vllm.connector"}
SEAMS = all_seams()
CHAIN = ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys")
FACTORY = ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory.get_connector_class")
MULTIPROCESSING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""vLLM's default for production: the engine core in a process of its own."""


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


@dataclass(frozen=True)
class Refusal:
    """An engine that has to stop when it starts.

    Attributes:
        launch: More arguments of `Launch`.
        error: What the error starts with.
        advice: What it also holds: usually the way out.
    """

    launch: dict[str, Any]
    error: str
    advice: str = ""


# Engines that have to stop.


def _connector(shown: str, reason: str = "", **connector: Any) -> Refusal:
    """An engine whose connector is refused, for the table's reason if the table has it."""
    why = f" ({reason})" if reason else ""
    error = (
        f"BindingError: kvprov does not bind the connector {shown}: its entries would be shared without regard to "
        f"provenance{why}."
    )
    return Refusal({"connector": connector}, error, "or set KVPROV_MODE=off to run without any protection")


def _below(*children: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a MultiConnector over `children`."""
    connectors_below = [{"kv_role": "kv_both", **child} for child in children]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors_below}}


STOCK_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
EXAMPLE = {"kv_connector": "ExampleConnector"}
NEEDS_GPU = ("HiSparseConnector",)
"""vLLM itself does not start with these here, before it asks for their class."""
NIXL = connectors.TABLE["NixlConnector"].reason
CONNECTORS = {
    **{
        name: _connector(name, entry.reason, kv_connector=name)
        for name, entry in sorted(connectors.TABLE.items())
        if entry.treatment not in connectors.BOUND and name not in NEEDS_GPU
    },
    "unknown": _connector("NoSuchConnector", kv_connector="NoSuchConnector"),
    "out of tree": _connector(
        "TheirConnector of their.package", kv_connector="TheirConnector", kv_connector_module_path="their.package"
    ),
    # vLLM's own class, by the way for classes from outside.
    "stock class by module": _connector(f"ExampleConnector of {STOCK_MODULE}", kv_connector_module_path=STOCK_MODULE),
    "below another": _connector("NixlConnector", NIXL, **_below(EXAMPLE, {"kv_connector": "NixlConnector"})),
    "two below": _connector("NixlConnector", NIXL, **_below(EXAMPLE, _below({"kv_connector": "NixlConnector"}))),
    "out of tree below another": _connector(
        f"ExampleConnector of {STOCK_MODULE}", **_below({**EXAMPLE, "kv_connector_module_path": STOCK_MODULE})
    ),
}

EXPLICIT_REFUSALS = {
    f"explicit with {name}": Refusal(
        {"connector": EXPLICIT, **launch},
        "BindingError: kvprov is not in effect in this process, although kvprov.engines.vllm.connector",
        "Let VLLM_PLUGINS be unset or name kvprov, and let KVPROV_MODE be unset or enforce; or, to run without any",
    )
    for name, launch in {
        "no plugins": {"env": {"VLLM_PLUGINS": ""}},
        "another plugin": {"env": {"VLLM_PLUGINS": "some_other_plugin"}},
        "off": {"mode": "off"},
    }.items()
}

RENAMED = {
    f"renamed {seam.module}.{seam.name}": Refusal(
        {"before": partial(tamper.rename, seam.module, seam.name)},
        f"BindingError: vLLM has no {seam.module}.{seam.name} as kvprov needs it",
        "or set KVPROV_MODE=off to run without any protection",
    )
    for seam in SEAMS
}

REPARAMETRISED = {
    f"reparametrised {seam.module}.{seam.name}": Refusal(
        {"before": partial(tamper.reparametrise, seam.module, seam.name)},
        f"BindingError: vLLM has no {seam.module}.{seam.name} with parameters {seam.parameters}",
        "or set KVPROV_MODE=off to run without any protection",
    )
    for seam in SEAMS
    if seam.parameters
}

UNDONE = {
    name: Refusal(
        {"before": before},
        f"BindingError: kvprov's self-check failed: {said}",
        "The engine does not start. Install a release of vLLM that this release of kvprov supports",
    )
    for name, before, said in (
        (
            "gone around",
            partial(tamper.go_around, *CHAIN),
            "the block-hash chain gives one key to requests that differ in",
        ),
        ("stock connector", partial(tamper.go_around, *FACTORY), "ExampleConnector is not a connector of kvprov's"),
        (
            "identifiers ignored",
            tamper.ignore_identifiers,
            "ExampleConnector's lookup gives one key to requests that differ in",
        ),
        (
            "identifiers ignored at lookup",
            partial(tamper.ignore_identifiers, "SCHEDULER"),
            "ExampleConnector's lookup gives one key to requests that differ in",
        ),
        (
            "identifiers ignored at load",
            partial(tamper.ignore_identifiers, "WORKER"),
            "ExampleConnector loads under other keys in a worker than it looks up",
        ),
        (
            "lookup elsewhere",
            tamper.look_up_elsewhere,
            "ExampleConnector stores under other keys than it looks up",
        ),
    )
}

RESTORED = {
    f"restored {name}": Refusal(
        {"before": partial(tamper.restore, module, name)},
        f"BindingError: Something replaced {module}.{name} after kvprov had bound it.",
        "Remove the plugin that does so, or let it wrap what it finds with functools.wraps.",
    )
    for module, name in (CHAIN, FACTORY, ("vllm.v1.engine.core", "get_request_block_hasher"))
}

SETTINGS = {
    "misspelt": Refusal(
        {"env": {"KVPROV_DIGEST_BIT": "128"}},
        "SettingsError: KVPROV_DIGEST_BIT is not a setting.",
        "KVPROV_DIGEST_BITS",
    ),
    "bits": Refusal({"env": {"KVPROV_DIGEST_BITS": "64"}}, "SettingsError: A KVPROV_* setting cannot be used: 64"),
    "mode": Refusal({"mode": "on"}, "SettingsError: A KVPROV_* setting cannot be used: 'on'", "kvprov doctor"),
    "label": Refusal({"env": {"KVPROV_WEIGHTS_LABEL": "no version"}}, "", "'no version'"),
    "short secret": Refusal({"env": {"KVPROV_SECRET": "hunter2"}}, "", "16"),
    "no secret": Refusal(
        {"env": {"KVPROV_REQUIRE_SECRET": "1"}},
        "SettingsError: KVPROV_REQUIRE_SECRET is set and there is no fleet secret.",
        "Set KVPROV_SECRET_FILE to a file of at least 16 random bytes",
    ),
}

REFUSALS = {
    # The slow ones first, beside the many quick ones.
    "two ranks": Refusal(
        {
            "args": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        },
        "RuntimeError: Worker failed with error 'ExampleConnector holds the state of one rank, and this engine has 2:",
        "Run it with one worker, or use another connector.",
    ),
    "worker without kvprov": Refusal(
        {"args": {"distributed_executor_backend": "mp"}, "before": tamper.filter_plugins_later},
        "BindingError: kvprov is not in effect in the worker process",
        "Let VLLM_PLUGINS be unset or name kvprov, and install kvprov where the workers run.",
    ),
    **CONNECTORS,
    **EXPLICIT_REFUSALS,
    **RENAMED,
    **REPARAMETRISED,
    **UNDONE,
    **RESTORED,
    **SETTINGS,
    "second attempt": Refusal(
        {"env": {"KVPROV_DIGEST_BIT": "128"}, "before": tamper.attempt},
        "SettingsError: KVPROV_DIGEST_BIT is not a setting.",
    ),
}


@pytest.fixture(scope="module")
def refused(
    processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[EngineDiedError, Path]]:
    """How each engine of `REFUSALS` ended, and its store."""
    folder = tmp_path_factory.mktemp("refused")
    stores = {name: folder / str(number) for number, name in enumerate(REFUSALS)}
    for store in stores.values():
        store.mkdir()
    ended = processes.run_all([(Launch(models.base, stores[name], **r.launch), []) for name, r in REFUSALS.items()])
    for name, run in zip(REFUSALS, ended, strict=True):
        assert isinstance(run, EngineDiedError), f"{name} started"
    return {name: (run, stores[name]) for name, run in zip(REFUSALS, ended, strict=True)}


def check_refusal(refused: dict[str, tuple[EngineDiedError, Path]], name: str) -> EngineDiedError:
    died, store = refused[name]
    assert re.sub(r"vLLM \S+ has", "vLLM has", died.message).startswith(REFUSALS[name].error), died
    assert REFUSALS[name].advice in died.message
    assert tamper.listing(store) == {}
    return died


@pytest.fixture(scope="module")
def seeded(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A store that a bound engine, with the plugin and no other setting, has written."""
    store = tmp_path_factory.mktemp("startup") / "store"
    store.mkdir()
    ask = partial(generate, prompts=prompts)
    run = processes.run(
        Launch(models.base, store), ask, partial(ask, adapter=models.adapter("standard"), salt="tenant-1")
    )
    assert [loaded(answers) for answers in run.results] == [0, 0]
    return store, run


# The start-up line.

LINE = re.compile(
    r"kvprov: mode=(?P<mode>\S+) connector=(?P<connector>\S+) dimensions=(?P<dimensions>\S+) worker=(?P<worker>\S+) "
    r"bits=(?P<bits>\d+) secret=(?P<secret>\S+)(?P<rest>.*)"
)


def line(run: Run) -> dict[str, str]:
    found = [match.groupdict() for match in LINE.finditer(run.log)]
    assert len(found) == 1, run.log
    return found[0]


def test_the_startup_line_says_what_is_bound(seeded: tuple[Path, Run], processes: Processes, models: Models) -> None:
    first = line(seeded[1])
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", first["worker"])
    assert first == {
        "mode": "enforce",
        "connector": "ExampleConnector",
        "dimensions": ",".join([*BUILT_IN.worker, *BUILT_IN.request]),
        "worker": first["worker"],
        "bits": "256",
        "secret": "none",
        "rest": "",
    }
    env = {"KVPROV_DIGEST_BITS": "128", "KVPROV_SECRET": SECRET, "KVPROV_SECRET_KEY_ID": "fleet-7"}
    run = processes.run(Launch(models.base, env=env))
    second = line(run)
    # The same worker, in another process, without a tier: what it is does not depend on either.
    half = base64.urlsafe_b64decode(first["worker"] + "=")[:16]
    assert second["worker"] == base64.urlsafe_b64encode(half).decode().rstrip("=")
    assert second == {**first, "connector": "none", "bits": "128", "secret": "fleet-7", "worker": second["worker"]}
    assert SECRET not in run.log


# Off, and not installed.


def test_off_writes_the_listing_of_a_process_without_kvprov(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path: Path, seeded: tuple[Path, Run]
) -> None:
    stores = {name: tmp_path / name for name in ("without", "filtered", "off")}
    for store in stores.values():
        store.mkdir()
    ask = partial(generate, prompts=prompts)
    steps = [ask, partial(ask, adapter=models.adapter("standard"), salt="tenant-1"), tamper.kvprov_modules]
    without_run, filtered_run, off_run = map(
        ran,
        processes.run_all(
            [
                (Launch(models.base, stores["without"], before=tamper.uninstall_kvprov), steps),
                (Launch(models.base, stores["filtered"], env={"VLLM_PLUGINS": ""}), steps),
                (Launch(models.base, stores["off"], mode="off"), steps),
            ]
        ),
    )
    without, filtered, off = (tamper.listing(store) for store in stores.values())
    assert without_run.results[2] == filtered_run.results[2] == []
    assert [n for n in off_run.results[2] if n.startswith("kvprov.engines.vllm.")] == ["kvprov.engines.vllm.plugin"]
    # Names and contents. Stock has one entry for each prompt, whatever adapter and salt.
    assert off == without == filtered
    assert len({Path(name).parts[0] for name in off}) == len(prompts)
    assert LINE.search(off_run.log + without_run.log + filtered_run.log) is None
    # The control: bound, other names, and two entries for each prompt.
    bound = tamper.listing(seeded[0])
    assert not set(bound) & set(off)
    assert len({Path(name).parts[0] for name in bound}) == 2 * len(prompts)


# Refused connectors.


def ask_the_factory(_engine: Engine) -> dict[str, tuple[str, str]]:
    """Ask for the class of each connector that vLLM knows, and return its module and name, or the error."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    answers = {}
    for name in KVConnectorFactory._registry:
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        try:
            found = KVConnectorFactory.get_connector_class(config)
            answers[name] = (found.__module__, found.__name__)
        except Exception as error:  # noqa: BLE001 - it is the result
            answers[name] = (type(error).__name__, str(error))
    return answers


@pytest.fixture(scope="module")
def answers(processes: Processes, models: Models) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = processes.run(Launch(models.base), ask_the_factory).results[0]
    return found


def test_every_connector_of_vllm_is_in_the_table(answers: dict[str, tuple[str, str]]) -> None:
    """A release that adds one is found here. One that drops one is no matter: the table is for several releases."""
    assert set(answers) - set(connectors.TABLE) == set()
    assert len(answers) > 10


def test_every_connector_of_vllm_is_bound_or_refused(answers: dict[str, tuple[str, str]]) -> None:
    for name, answer in answers.items():
        entry = connectors.TABLE[name]
        if entry.treatment in connectors.BOUND:
            # Under its own name, by which vLLM finds its statistics.
            assert answer == (entry.module, name)
            assert entry.strength
            continue
        kind, text = answer
        assert kind == "BindingError"
        assert text.startswith(f"kvprov does not bind the connector {name}:")
        assert f"({entry.reason})." in text
        assert "ExampleConnector" in text.partition("Use a connector that kvprov binds")[2]
        assert "KVPROV_MODE=off" in text


@pytest.mark.parametrize("name", CONNECTORS)
def test_an_engine_with_an_unbound_connector_does_not_start(
    refused: dict[str, tuple[EngineDiedError, Path]], name: str
) -> None:
    assert "ExampleConnector" in check_refusal(refused, name).message.partition("Use a connector that kvprov binds")[2]


# The explicit connector.


def test_the_explicit_connector_shares_with_the_implicit_one(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, store: Path, seeded: tuple[Path, Run]
) -> None:
    ask = partial(generate, prompts=prompts)
    explicit = Launch(models.base, store, connector=EXPLICIT)
    of_implicit = Launch(models.base, copied(seeded[0], "explicit"), connector=EXPLICIT)
    other = partial(ask, adapter=models.adapter("inverted"))
    first, implicit = map(ran, processes.run_all([(explicit, [ask]), (of_implicit, [ask, other])]))
    second = processes.run(explicit, ask)
    assert loaded(first.results[0]) == 0
    assert loaded(second.results[0]) == full
    assert [loaded(answers) for answers in implicit.results] == [full, 0]
    assert tokens(first.results[0]) == tokens(second.results[0]) == tokens(implicit.results[0])
    assert line(implicit)["connector"] == "ExampleConnector"


@pytest.mark.parametrize("name", EXPLICIT_REFUSALS)
def test_the_explicit_connector_refuses_to_start_without_the_plugin(
    refused: dict[str, tuple[EngineDiedError, Path]], name: str
) -> None:
    check_refusal(refused, name)


# Another vLLM.


@pytest.mark.parametrize("name", RENAMED)
def test_a_renamed_function_of_vllm_stops_the_engine(
    refused: dict[str, tuple[EngineDiedError, Path]], name: str
) -> None:
    assert "Install a release of vLLM that this release of kvprov supports" in check_refusal(refused, name).message


@pytest.mark.parametrize("name", REPARAMETRISED)
def test_other_parameters_of_a_function_of_vllm_stop_the_engine(
    refused: dict[str, tuple[EngineDiedError, Path]], name: str
) -> None:
    check_refusal(refused, name)


@pytest.mark.parametrize("damage", [tamper.rename, tamper.reparametrise])
def test_nothing_is_half_installed(processes: Processes, models: Models, damage: Callable[[str, str], None]) -> None:
    seams = [(seam.module, seam.name) for seam in SEAMS if seam.parameters or damage is tamper.rename]
    run = processes.run(
        Launch(models.base, mode="off"),
        partial(call, function=partial(tamper.try_each, seams, damage)),
        partial(call, function=tamper.install_and_list),
    )
    results, whole = run.results
    assert [(name, replaced) for name, _, replaced in results] == [(name, []) for _, name in seams]
    assert all(said.startswith("BindingError: ") and name in said for name, said, _ in results)
    # The control: with vLLM as it is, all of them are.
    assert whole == [seam.name for seam in SEAMS]


# Binding undone behind its back: the self-check.


@pytest.mark.parametrize("name", RESTORED)
def test_a_seam_that_is_undone_stops_the_engine(refused: dict[str, tuple[EngineDiedError, Path]], name: str) -> None:
    check_refusal(refused, name)


def test_every_seam_that_is_undone_is_found(processes: Processes, models: Models) -> None:
    run = processes.run(Launch(models.base), partial(call, function=tamper.restore_each))
    found, whole = run.results[0]
    assert found == {f"{seam.module}.{seam.name}": [f"{seam.module}.{seam.name}"] for seam in SEAMS}
    assert whole == []


@pytest.mark.parametrize("name", UNDONE)
def test_the_self_check_finds_what_is_undone(refused: dict[str, tuple[EngineDiedError, Path]], name: str) -> None:
    check_refusal(refused, name)


def test_a_worker_without_kvprov_stops_the_engine(refused: dict[str, tuple[EngineDiedError, Path]]) -> None:
    """The workers are processes of their own here, and only they are started where the plugin is filtered out."""
    died = check_refusal(refused, "worker without kvprov")
    worker = re.search(r"in the worker process (\d+)", died.message)
    assert worker is not None
    # vLLM's log names the process of each line.
    assert re.search(rf"Worker\S* pid={worker[1]}\)", died.log)


# Shapes that are refused.


def test_two_ranks_stop_the_engine(refused: dict[str, tuple[EngineDiedError, Path]]) -> None:
    assert "BindingError: ExampleConnector holds the state of one rank" in check_refusal(refused, "two ranks").log


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_several_ranks_are_refused(ranks: int) -> None:
    """Of whatever kind: the number that counts is vLLM's own."""
    connectors.check_shape(SimpleNamespace(world_size=1), "TheirConnector")
    with pytest.raises(BindingError, match=f"TheirConnector holds the state of one rank, and this engine has {ranks}:"):
        connectors.check_shape(SimpleNamespace(world_size=ranks), "TheirConnector")


# Settings.


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_cannot_be_used_stops_the_engine(
    refused: dict[str, tuple[EngineDiedError, Path]], name: str
) -> None:
    # A secret that is refused is not shown.
    assert "hunter2" not in check_refusal(refused, name).log


def test_the_demanded_secret_is_enough(processes: Processes, models: Models, store: Path) -> None:
    env = {"KVPROV_REQUIRE_SECRET": "1", "KVPROV_SECRET": SECRET}
    assert line(processes.run(Launch(models.base, store, env=env)))["secret"] != "none"


def test_a_refused_engine_is_refused_again(refused: dict[str, tuple[EngineDiedError, Path]]) -> None:
    """vLLM loads plugins once in a process: a second attempt, as in a notebook, must not go on without kvprov."""
    assert "first attempt: SettingsError" in check_refusal(refused, "second attempt").log


# The engine core in a process of its own.


def test_multiprocessing_is_bound_too(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, store: Path, seeded: tuple[Path, Run]
) -> None:
    own, other_adapter, other_salt, both = (
        partial(generate, prompts=prompts, adapter=models.adapter(policy, number), salt=salt)
        for policy, number, salt in (
            ("standard", 1, "tenant-1"),
            ("inverted", 2, "tenant-1"),
            ("standard", 1, "tenant-2"),
            ("inverted", 2, "tenant-2"),
        )
    )
    shared = copied(seeded[0], "multiprocessing")
    read, no_connector, no_setting = processes.run_all(
        [
            (Launch(models.base, shared, env=MULTIPROCESSING), [other_adapter, other_salt, own]),
            (Launch(models.base, store, env=MULTIPROCESSING, connector={"kv_connector": "NixlConnector"}), []),
            (Launch(models.base, store, env=MULTIPROCESSING, before=tamper.misspell_a_setting_later), []),
        ],
    )
    # Each form of engine reads what the other wrote, so both derive the same keys.
    read = ran(read)
    reread = processes.run(Launch(models.base, shared), both, other_adapter, other_salt)
    assert [loaded(answers) for answers in read.results] == [0, 0, full]
    assert [loaded(answers) for answers in reread.results] == [0, full, full]
    assert tokens(read.results[2]) == tokens(seeded[1].results[1]) != tokens(read.results[0])
    assert [tokens(answers) for answers in reread.results[1:]] == [tokens(answers) for answers in read.results[:2]]
    assert line(read)["worker"] == line(seeded[1])["worker"]
    # Errors of either process are in the log.
    assert isinstance(no_connector, EngineDiedError)
    assert "BindingError: kvprov does not bind the connector NixlConnector" in no_connector.log
    assert isinstance(no_setting, EngineDiedError)
    assert re.search(r"EngineCore.*SettingsError: KVPROV_DIGEST_BIT is not a setting\.", no_setting.log)


# Weights that have no identity.


def test_weights_without_identity_bypass_the_tier_and_a_label_lets_them_share(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, tmp_path: Path
) -> None:
    ask = partial(generate, prompts=prompts, salt="tenant-1")

    def launch(name: str, label: str = "") -> Launch:
        store = tmp_path / name
        store.mkdir(exist_ok=True)
        env = {"KVPROV_WEIGHTS_LABEL": label} if label else {}
        return Launch(models.base, store, env=env, args={"load_format": "dummy"})

    count = partial(bypassed, reason="weights")
    # Twice the same: what was not stored cannot be read.
    unlabelled, seed = map(
        ran,
        processes.run_all([(launch("unlabelled"), [ask, ask, count]), (launch("labelled", "run/1"), [ask, count])]),
    )
    assert [loaded(answers) for answers in unlabelled.results[:2]] == [0, 0]
    assert [len(answer.tokens) for answer in unlabelled.results[0]] == [32] * len(prompts)
    assert tamper.listing(tmp_path / "unlabelled") == {}
    assert unlabelled.results[2] == 2 * len(prompts)
    assert "bypasses the shared tier: weights: the load format 'dummy' is not followed." in unlabelled.log
    assert "unknown=(weights: the load format 'dummy' is not followed)" in line(unlabelled)["rest"]
    assert seed.results[1] == 0
    copied(tmp_path / "labelled", "other")
    other, own = map(
        ran, processes.run_all([(launch("labelled-other", "run/2"), [ask]), (launch("labelled", "run/1"), [ask])])
    )
    assert loaded(seed.results[0]) == loaded(other.results[0]) == 0
    assert loaded(own.results[0]) == full
    assert tokens(own.results[0]) == tokens(seed.results[0]) == tokens(unlabelled.results[0])


# Prompt embeddings.


def test_prompt_embeddings_complete_and_stay_out_of_the_tier(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    embeddings = partial(complete_embeddings, prompts=prompts)
    listing = partial(call, function=partial(tamper.listing, store))
    args = {"enable_prompt_embeds": True}
    ask = partial(generate, prompts=prompts)
    plain, bound = map(
        ran,
        processes.run_all(
            [
                (Launch(models.base, None, "off", args=args, before=tamper.uninstall_kvprov), [embeddings]),
                (Launch(models.base, store, args=args), [embeddings, embeddings, listing, ask, listing]),
            ]
        ),
    )
    assert bound.results[0] == bound.results[1] == plain.results[0]
    assert bound.results[2] == {}
    assert "bypasses the shared tier: prompt embeddings" in bound.log
    # The control: the same prompts as tokens give the same answers, and are stored.
    assert tokens(bound.results[3]) == plain.results[0]
    assert len({Path(name).parts[0] for name in bound.results[4]}) == len(prompts)
