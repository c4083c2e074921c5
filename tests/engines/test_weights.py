"""The identity of the weights is that of what was loaded, whatever happens to their files meanwhile.

An attacker who exchanges a checkpoint while an engine loads it wants an entry under the identity of other weights. So
honest engines of either checkpoint read what each disturbed engine stored: all that they load must give their own
answers.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support import tamper
from tests.support.engine import Answer, Engine, Launch
from tests.support.models import Models, loadable
from tests.support.processes import EngineDiedError, Processes, Run
from tests.support.provenance import copied
from tests.support.steps import call, generate, loaded, same
from tests.support.swaps import (
    FILE,
    FOLDER,
    HALF_READ,
    HASHED,
    IN_PLACE,
    LINK,
    LISTED,
    LOADED,
    MAP,
    OPENED,
    READ,
    RENAME,
    Swaps,
    content,
)

pytestmark = pytest.mark.engine

ONE, TWO, NOTHING = "one", "two", "nothing"
CASES: dict[tuple[str, ...], str] = {
    # Before the files are opened, the engine simply has the second checkpoint.
    (RENAME, LISTED): TWO,
    (IN_PLACE, LISTED): TWO,
    (FOLDER, LISTED): TWO,
    (LINK, LISTED): TWO,
    # Afterwards, another file at the path is not seen, not even if it is gone again.
    (FOLDER, OPENED): ONE,
    (FOLDER, OPENED, LOADED): ONE,
    (LINK, OPENED): ONE,
    # A file that loses its name changes, as far as its times say. That costs the tier, not the truth.
    (RENAME, OPENED): NOTHING,
    (RENAME, OPENED, LOADED): NOTHING,
    # A write into the file itself leaves it unknown what was read, whatever the file's times say.
    (IN_PLACE, OPENED): NOTHING,
    (IN_PLACE, HALF_READ): NOTHING,
    (IN_PLACE, READ): NOTHING,
    (IN_PLACE, LOADED): NOTHING,
    (IN_PLACE, HASHED): NOTHING,
    (IN_PLACE, OPENED, LOADED): NOTHING,
    (MAP, LOADED): NOTHING,
    (MAP, OPENED, LOADED): NOTHING,
}
"""What is exchanged how, at which points of a load, and which weights the engine then claims."""


def ask_stores(engine: Engine, *, stores: dict[str, Path], prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """Ask the same of several stores, one after another."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    answers = {}
    for name, store in stores.items():
        for half in (engine.core.scheduler.get_kv_connector(), get_kv_transfer_group()):
            half._storage_path = str(store)
        answers[name] = engine.generate(prompts)
    return answers


def worker_digest(run: Run) -> str:
    found = re.findall(r"kvprov: mode=enforce .* worker=(\S+) ", run.log)
    assert len(found) == 1, run.log
    return str(found[0])


def ran(ended: Run | EngineDiedError) -> Run:
    if isinstance(ended, EngineDiedError):
        raise ended
    return ended


@dataclass(frozen=True)
class Honest:
    """An engine that nobody disturbs."""

    answers: list[Answer]
    digest: str
    store: Path


@dataclass
class Attacks:
    """All runs.

    Attributes:
        full: How many tokens an engine loads that reads its own.
        honest: By weights.
        disturbed: The attacked engines, by what was done: answers, points that were passed, content of the path after.
        stores: Theirs, as they left them.
        read: What an honest engine gets of each store, by its weights and the attack.
        stock: The attacked engine without kvprov.
    """

    full: int
    folders: dict[str, str]
    honest: dict[str, Honest]
    disturbed: dict[str, Run]
    stores: dict[str, Path]
    read: dict[str, dict[str, list[Answer]]]
    stock: Run


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    return models.prompts(4)


@pytest.fixture(scope="module")
def attacks(
    processes: Processes, models: Models, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Attacks:
    folder = tmp_path_factory.mktemp("weights")
    folders = {name: models.copy_base(folder / name) for name in (ONE, TWO)}
    models.perturb(Path(folders[ONE]), seed=1)
    models.perturb(Path(folders[TWO]), seed=2)
    ask = partial(generate, prompts=prompts)

    def store(name: str) -> Path:
        (folder / "stores" / name).mkdir(parents=True)
        return folder / "stores" / name

    def attack(name: str, key: tuple[str, ...], mode: str = "enforce") -> tuple[Launch, list[partial]]:
        method, *at = key
        swaps = Swaps(method, tuple(at), str(folder / f"model-{name}"), folders[ONE], folders[TWO])
        swaps.prepare()
        launch = Launch(swaps.model, store(name), mode, before=swaps)
        after = partial(content, swaps.model)
        return launch, [ask, partial(call, function=swaps.passed), partial(call, function=after)]

    seeded = {name: store(f"honest-{name}") for name in folders}
    plans = [(Launch(folders[name], seeded[name]), [ask]) for name in folders]
    plans.append(attack("stock", (RENAME, OPENED, LOADED), "off"))
    plans += [attack(" ".join(key), key) for key in CASES]
    runs = [ran(ended) for ended in processes.run_all(plans)]
    honest = {
        name: Honest(run.results[0], worker_digest(run), seeded[name])
        for name, run in zip(folders, runs[:2], strict=True)
    }
    disturbed = dict(zip(map(" ".join, CASES), runs[3:], strict=True))
    stores = {name: folder / "stores" / name for name in disturbed}
    everything = {**stores, **{f"honest {name}": seeded[name] for name in folders}}
    readers = [
        (
            Launch(folders[name], store(f"reader-{name}")),
            [partial(ask_stores, stores={n: copied(s, name) for n, s in everything.items()}, prompts=prompts)],
        )
        for name in folders
    ]
    read = {name: ran(ended).results[0] for name, ended in zip(folders, processes.run_all(readers), strict=True)}
    full = sum(loadable(len(prompt)) for prompt in prompts)
    return Attacks(full, folders, honest, disturbed, stores, read, runs[2])


def test_honest_engines_share_with_their_like_alone(attacks: Attacks) -> None:
    """The control: the two checkpoints answer differently, and each is read in full by its like."""
    one, two = attacks.honest[ONE], attacks.honest[TWO]
    assert one.digest != two.digest
    assert not same(one.answers, two.answers)
    for reader in (ONE, TWO):
        for writer in (ONE, TWO):
            answers = attacks.read[reader][f"honest {writer}"]
            assert loaded(answers) == (attacks.full if reader == writer else 0)
            assert same(answers, attacks.honest[reader].answers)


def test_the_attack_works_on_stock(attacks: Attacks) -> None:
    """The control: it loads what the path held for the blink of an eye, and nothing shows it afterwards."""
    answers, passed, after = attacks.stock.results
    assert passed == [OPENED, LOADED]
    assert after == content(attacks.folders[ONE])
    assert same(answers, attacks.honest[TWO].answers)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_what_is_claimed_is_what_was_loaded(attacks: Attacks, case: tuple[str, ...]) -> None:
    name = " ".join(case)
    answers, passed, after = attacks.disturbed[name].results
    # The attack took place.
    assert passed == list(case[1:])
    assert after == content(attacks.folders[ONE if len(passed) == 2 else TWO])
    assert loaded(answers) == 0
    entries = tamper.listing(attacks.stores[name])
    claimed = CASES[case]
    if claimed == NOTHING:
        assert entries == {}
        assert "the file changed while it was in use" in attacks.disturbed[name].log
        assert "bypasses the shared tier: weights:" in attacks.disturbed[name].log
    else:
        assert worker_digest(attacks.disturbed[name]) == attacks.honest[claimed].digest
        assert same(answers, attacks.honest[claimed].answers)
        assert set(entries) == set(tamper.listing(attacks.honest[claimed].store))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_no_honest_engine_reads_foreign_state_of_a_disturbed_one(attacks: Attacks, case: tuple[str, ...]) -> None:
    name = " ".join(case)
    for reader in (ONE, TWO):
        answers = attacks.read[reader][name]
        assert loaded(answers) == (attacks.full if CASES[case] == reader else 0)
        assert same(answers, attacks.honest[reader].answers)


def _shard(source: str, target: Path) -> None:
    """Write the same weights as two files and an index, the tensors in another order."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns(FILE))
    tensors = load_file(Path(source) / FILE)
    names = sorted(tensors, key=lambda name: name[::-1])
    weight_map = {}
    for number, part in enumerate((names[:7], names[7:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file(
            {name: tensors[name] for name in part}, target / shard, metadata={"format": "pt", "note": "resharded"}
        )
        weight_map.update(dict.fromkeys(part, shard))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (target / f"{FILE}.index.json").write_text(json.dumps(index))


def test_sharding_names_and_paths_do_not_matter(
    processes: Processes, prompts: list[list[int]], attacks: Attacks, tmp_path: Path
) -> None:
    source, honest = attacks.folders[ONE], attacks.honest[ONE]
    _shard(source, tmp_path / "sharded")
    shutil.copytree(source, tmp_path / "renamed")
    (tmp_path / "link").symlink_to(source)
    ask = partial(generate, prompts=prompts)
    names = ("sharded", "renamed", "link")
    for name, run in zip(
        names,
        processes.run_all([(Launch(str(tmp_path / n), copied(honest.store, n)), [ask]) for n in names]),
        strict=True,
    ):
        run = ran(run)
        assert worker_digest(run) == honest.digest, name
        assert loaded(run.results[0]) == attacks.full, name
        assert same(run.results[0], honest.answers), name
