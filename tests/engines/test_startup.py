"""What an engine says and does when it starts: bound, off, or not at all."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprov.contract.dimensions import BUILT_IN
from kvprov.engines.vllm import connectors
from kvprov.engines.vllm.seams import _seams
from kvprov.errors import BindingError
from tests.support import tamper
from tests.support.engine import Engine, Launch
from tests.support.models import Models, loadable
from tests.support.processes import EngineDiedError, Processes, Run
from tests.support.provenance import copied
from tests.support.steps import bypassed, call, complete_embeddings, generate, loaded, tokens

pytestmark = pytest.mark.engine

SECRET = "correct-horse-battery-staple"
EXPLICIT = {"kv_connector_module_path": "kvprov.engines.vllm.connector"}
SEAMS = {f"{seam.module}:{seam.name}": seam for seam in _seams()}


def refuses(processes: Processes, launch: Launch, *patterns: str) -> EngineDiedError:
    """Start an engine that has to stop with an error of kvprov's, which holds all of `patterns`."""
    with pytest.raises(EngineDiedError) as died:
        processes.run(launch)
    for pattern in patterns:
        assert re.search(pattern, died.value.message), died.value
    return died.value


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    return models.prompts(4)


@pytest.fixture(scope="module")
def full(prompts: list[list[int]]) -> int:
    return sum(loadable(len(prompt)) for prompt in prompts)


@pytest.fixture(scope="module")
def seeded(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A store that a bound engine, with the plugin and no other setting, has written."""
    store = tmp_path_factory.mktemp("startup") / "store"
    store.mkdir()
    ask = partial(generate, prompts=prompts)
    run = processes.run(Launch(models.base, store), ask, partial(ask, adapter=models.adapter("standard"), salt="tenant-1"))
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
    def run(name: str, **launch: Any) -> tuple[dict[str, str], Run]:
        store = tmp_path / name
        store.mkdir()
        ask = partial(generate, prompts=prompts)
        ended = processes.run(
            Launch(models.base, store, **launch),
            ask,
            partial(ask, adapter=models.adapter("standard"), salt="tenant-1"),
            tamper.kvprov_modules,
        )
        return tamper.listing(store), ended

    without, without_run = run("without", before=tamper.uninstall_kvprov)
    filtered, filtered_run = run("filtered", env={"VLLM_PLUGINS": ""})
    off, off_run = run("off", mode="off")
    assert without_run.results[2] == filtered_run.results[2] == []
    assert not [name for name in off_run.results[2] if name.startswith("kvprov.engines.vllm.") and name[22:] != "plugin"]
    # Names and contents. Stock has one entry for each prompt, whatever adapter and salt.
    assert off == without == filtered
    assert len({Path(name).parts[0] for name in off}) == len(prompts)
    assert LINE.search(off_run.log + without_run.log + filtered_run.log) is None
    # The control: bound, other names, and two entries for each prompt.
    bound = tamper.listing(seeded[0])
    assert not set(bound) & set(off)
    assert len({Path(name).parts[0] for name in bound}) == 2 * len(prompts)


# Refused connectors.


def ask_the_factory(_engine: Engine) -> dict[str, str]:
    """Ask for the class of each connector that vLLM knows, and return the answers."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    answers = {}
    for name in KVConnectorFactory._registry:
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        try:
            answers[name] = KVConnectorFactory.get_connector_class(config).__name__
        except Exception as error:  # noqa: BLE001 - it is the result
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def test_every_other_connector_of_vllm_is_refused_by_name(processes: Processes, models: Models) -> None:
    answers = processes.run(Launch(models.base), ask_the_factory).results[0]
    bound = {name for name, entry in connectors.TABLE.items() if entry.treatment is not connectors.Treatment.REFUSED}
    assert answers["ExampleConnector"] == "BoundExampleConnector"
    refused = set(answers) - bound
    assert len(refused) > 10
    for name in refused:
        assert answers[name].startswith(f"BindingError: kvprov does not bind the connector {name}:"), answers[name]
        assert "ExampleConnector" in answers[name].partition("Use a connector that kvprov binds")[2]
        assert "KVPROV_MODE=off" in answers[name]


@pytest.mark.parametrize(
    ("connector", "shown"),
    [
        ({"kv_connector": "OffloadingConnector"}, "OffloadingConnector"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}],
                },
            },
            "MultiConnector",
        ),
        (
            {"kv_connector": "TheirConnector", "kv_connector_module_path": "their.package"},
            "TheirConnector of their.package",
        ),
        (
            # vLLM's own class, by the way for classes from outside.
            {"kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"},
            "ExampleConnector of vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
        ),
    ],
    ids=["offloading", "multi", "out-of-tree", "stock class by module"],
)
def test_an_engine_with_an_unbound_connector_does_not_start(
    processes: Processes, models: Models, store: Path, connector: dict[str, Any], shown: str
) -> None:
    refuses(
        processes,
        Launch(models.base, store, connector=connector),
        rf"BindingError: kvprov does not bind the connector {re.escape(shown)}:",
        "ExampleConnector.*KVPROV_MODE=off",
    )
    assert tamper.listing(store) == {}


# The explicit connector.


def test_the_explicit_connector_shares_with_the_implicit_one(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, store: Path, seeded: tuple[Path, Run]
) -> None:
    ask = partial(generate, prompts=prompts)
    explicit = Launch(models.base, store, connector=EXPLICIT)
    first = processes.run(explicit, ask)
    second = processes.run(explicit, ask)
    of_implicit = processes.run(
        Launch(models.base, copied(seeded[0], "explicit"), connector=EXPLICIT),
        partial(ask, adapter=models.adapter("inverted")),
        ask,
    )
    assert loaded(first.results[0]) == 0
    assert loaded(second.results[0]) == full
    assert [loaded(answers) for answers in of_implicit.results] == [0, full]
    assert tokens(first.results[0]) == tokens(second.results[0]) == tokens(of_implicit.results[1])
    assert line(of_implicit)["connector"] == "ExampleConnector"


@pytest.mark.parametrize(
    "launch",
    [{"env": {"VLLM_PLUGINS": ""}}, {"env": {"VLLM_PLUGINS": "some_other_plugin"}}, {"mode": "off"}],
    ids=["no plugins", "another plugin", "off"],
)
def test_the_explicit_connector_refuses_to_start_without_the_plugin(
    processes: Processes, models: Models, store: Path, launch: dict[str, Any]
) -> None:
    refuses(
        processes,
        Launch(models.base, store, connector=EXPLICIT, **launch),
        "BindingError: kvprov is not in effect in this process",
        "Let VLLM_PLUGINS be unset or name kvprov, and let KVPROV_MODE be unset or enforce",
    )


# Another vLLM.


@pytest.mark.parametrize("name", SEAMS)
def test_a_renamed_function_of_vllm_stops_the_engine(processes: Processes, models: Models, store: Path, name: str) -> None:
    seam = SEAMS[name]
    launch = Launch(models.base, store, before=partial(tamper.rename, seam.module, seam.name))
    error = refuses(processes, launch, rf"BindingError: vLLM \S+ has no {re.escape(seam.module)}\.{re.escape(seam.name)} ")
    assert re.search("Install a release of vLLM that .* supports.*KVPROV_MODE=off", error.message)


@pytest.mark.parametrize("name", [name for name, seam in SEAMS.items() if seam.parameters])
def test_other_parameters_of_a_function_of_vllm_stop_the_engine(
    processes: Processes, models: Models, store: Path, name: str
) -> None:
    seam = SEAMS[name]
    launch = Launch(models.base, store, before=partial(tamper.reparametrise, seam.module, seam.name))
    refuses(processes, launch, rf"BindingError: vLLM \S+ has no {re.escape(seam.module)}\.{re.escape(seam.name)} with param")


@pytest.mark.parametrize("damage", [tamper.rename, tamper.reparametrise])
def test_nothing_is_half_installed(processes: Processes, models: Models, damage: Callable[[str, str], None]) -> None:
    seams = [(seam.module, seam.name) for seam in SEAMS.values() if seam.parameters or damage is tamper.rename]
    run = processes.run(
        Launch(models.base, mode="off"),
        partial(call, function=partial(tamper.try_each, seams, damage)),
        partial(call, function=tamper.install_and_list),
    )
    results, whole = run.results
    assert [(name, replaced) for name, _, replaced in results] == [(name, []) for _, name in seams]
    assert all(said.startswith("BindingError: ") and name in said for name, said, _ in results)
    # The control: with vLLM as it is, all of them are.
    assert whole == [seam.name for seam in SEAMS.values()]


# Binding undone behind its back: the self-check.

CHAIN = ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys")
FACTORY = ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory.get_connector_class")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (partial(tamper.restore, *CHAIN), "the block-hash chain gives one key to requests that differ in "),
        (partial(tamper.go_around, *CHAIN), "the block-hash chain gives one key to requests that differ in "),
        (partial(tamper.restore, *FACTORY), "ExampleConnector is not a connector of kvprov's"),
        (tamper.ignore_identifiers, "ExampleConnector's lookup gives one key to requests that differ in "),
        (partial(tamper.ignore_identifiers, "SCHEDULER"), "ExampleConnector's lookup gives one key to requests that differ"),
        (partial(tamper.ignore_identifiers, "WORKER"), "ExampleConnector loads under other keys in a worker"),
        (tamper.look_up_elsewhere, "ExampleConnector stores under other keys than it looks up"),
    ],
    ids=["restored", "gone around", "stock connector", "no identifiers", "none at lookup", "none at load", "lookup"],
)
def test_the_self_check_finds_what_is_undone(
    processes: Processes, models: Models, store: Path, before: Callable[[], None], said: str
) -> None:
    error = refuses(processes, Launch(models.base, store, before=before), "BindingError: kvprov's self-check failed: ")
    assert said in error.message, error
    assert tamper.listing(store) == {}


def test_a_worker_without_kvprov_stops_the_engine(processes: Processes, models: Models, store: Path) -> None:
    """The workers are processes of their own here, and only they are started where the plugin is filtered out."""
    launch = Launch(
        models.base, store, args={"distributed_executor_backend": "mp"}, before=tamper.filter_plugins_later
    )
    refuses(processes, launch, r"BindingError: kvprov is not in effect in the worker process \d+")


# Shapes that are refused.


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)])
def test_several_ranks_are_refused(ranks: tuple[int, int]) -> None:
    config = SimpleNamespace(tensor_parallel_size=ranks[0], pipeline_parallel_size=ranks[1])
    connectors.check_shape(SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1))
    with pytest.raises(BindingError, match=f"holds the state of one rank, and this engine has {ranks[0] * ranks[1]}"):
        connectors.check_shape(config)


# Settings.


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KVPROV_DIGEST_BIT": "128"}, "SettingsError: KVPROV_DIGEST_BIT is not a setting. .*KVPROV_DIGEST_BITS"),
        ({"KVPROV_DIGEST_BITS": "64"}, "SettingsError: .*64"),
        ({"KVPROV_MODE": "on"}, "SettingsError: .*'on'"),
        ({"KVPROV_WEIGHTS_LABEL": "no version"}, "Error: .*no version"),
        ({"KVPROV_SECRET": "hunter2"}, "Error: .*16"),
        ({"KVPROV_REQUIRE_SECRET": "1"}, "BindingError: KVPROV_REQUIRE_SECRET is set and there is no .*KVPROV_SECRET_FILE"),
    ],
    ids=["misspelt", "bits", "mode", "label", "short secret", "no secret"],
)
def test_a_setting_that_cannot_be_used_stops_the_engine(
    processes: Processes, models: Models, store: Path, env: dict[str, str], said: str
) -> None:
    error = refuses(processes, Launch(models.base, store, env=env), said)
    assert "hunter2" not in error.log
    assert tamper.listing(store) == {}


def test_the_demanded_secret_is_enough(processes: Processes, models: Models, store: Path) -> None:
    env = {"KVPROV_REQUIRE_SECRET": "1", "KVPROV_SECRET": SECRET}
    assert line(processes.run(Launch(models.base, store, env=env)))["secret"] != "none"


def test_a_refused_engine_is_refused_again(processes: Processes, models: Models, store: Path) -> None:
    """vLLM loads plugins once in a process: a second attempt, as in a notebook, must not go on without kvprov."""
    launch = Launch(models.base, store, env={"KVPROV_DIGEST_BIT": "128"})
    before = partial(tamper.attempt, launch)
    refuses(
        processes,
        Launch(models.base, store, env={"KVPROV_DIGEST_BIT": "128"}, before=before),
        "SettingsError: KVPROV_DIGEST_BIT is not a setting",
    )


# vLLM's default for production: the engine core in a process of its own.

MULTIPROCESSING = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def test_multiprocessing_is_bound_too(
    processes: Processes, models: Models, prompts: list[list[int]], full: int, store: Path, seeded: tuple[Path, Run]
) -> None:
    standard, inverted = models.adapter("standard"), models.adapter("inverted", 2)
    own = partial(generate, prompts=prompts, adapter=standard, salt="tenant-1")
    other_adapter = partial(generate, prompts=prompts, adapter=inverted, salt="tenant-1")
    other_salt = partial(generate, prompts=prompts, adapter=standard, salt="tenant-2")
    launch = Launch(models.base, store, env=MULTIPROCESSING)
    # Reading what the engine in one process wrote shows that both forms derive the same keys.
    reader = Launch(models.base, copied(seeded[0], "multiprocessing"), env=MULTIPROCESSING)
    refused = Launch(models.base, store, env=MULTIPROCESSING, connector={"kv_connector": "OffloadingConnector"})
    seed, read, died = processes.run_all(
        [(launch, [own]), (reader, [other_adapter, other_salt, own]), (refused, [])],
    )
    assert isinstance(seed, Run), seed
    assert isinstance(read, Run), read
    assert isinstance(died, EngineDiedError), died
    again = processes.run(launch, other_salt, other_adapter, own)
    assert loaded(seed.results[0]) == 0
    assert [loaded(answers) for answers in read.results] == [0, 0, full]
    assert [loaded(answers) for answers in again.results] == [0, 0, full]
    assert tokens(seed.results[0]) == tokens(read.results[2]) == tokens(again.results[2])
    assert tokens(read.results[0]) == tokens(again.results[1]) != tokens(seed.results[0])
    assert line(read)["worker"] == line(seeded[1])["worker"]
    assert "kvprov does not bind the connector OffloadingConnector" in died.log


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

    # Twice each: what was not stored cannot be read.
    count = partial(bypassed, reason="weights")
    unlabelled = processes.run(launch("unlabelled"), ask, ask, count)
    assert [loaded(answers) for answers in unlabelled.results[:2]] == [0, 0]
    assert [len(answer.tokens) for answer in unlabelled.results[0]] == [32] * len(prompts)
    assert tamper.listing(tmp_path / "unlabelled") == {}
    assert unlabelled.results[2] == 2 * len(prompts)
    assert "bypasses the shared tier: weights: the load format 'dummy' is not followed." in unlabelled.log
    assert "unknown=(weights: the load format 'dummy' is not followed)" in line(unlabelled)["rest"]

    seed = processes.run(launch("labelled", "run/1"), ask, count)
    assert seed.results[1] is None
    other = processes.run(launch("labelled", "run/2"), ask)
    own = processes.run(launch("labelled", "run/1"), ask)
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
    plain = processes.run(Launch(models.base, None, "off", args=args, before=tamper.uninstall_kvprov), embeddings)
    ask = partial(generate, prompts=prompts)
    bound = processes.run(Launch(models.base, store, args=args), embeddings, embeddings, listing, ask, listing)
    assert bound.results[0] == bound.results[1] == plain.results[0]
    assert bound.results[2] == {}
    assert "bypasses the shared tier: prompt embeddings" in bound.log
    # The control: the same prompts as tokens give the same answers, and are stored.
    assert tokens(bound.results[3]) == plain.results[0]
    assert len({Path(name).parts[0] for name in bound.results[4]}) == len(prompts)
