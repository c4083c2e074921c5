"""Every place where HiCache forms or uses a key uses the same one: lookup, prefetch, read and write."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.support.packages import install
from tests.support.sglang import key_recorder
from tests.support.sglang.engine import PAGE, Launch
from tests.support.sglang.models import LongModels
from tests.support.sglang.plugins import GROUP
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import generate, stored, written

pytestmark = pytest.mark.engine

SITES = ("lookup", "prefetch", "read", "write")


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What to put on the path of an engine whose keys are to be noted."""
    source = Path(key_recorder.__file__).read_text()
    return install(
        tmp_path_factory.mktemp("recorder"), "sglang_key_recorder", source, {"key_recorder": "register"}, group=GROUP
    )


def sites(log: Path) -> dict[str, list[str]]:
    """Return the keys of each site, in the order in which they were first used."""
    found: dict[str, list[str]] = {site: [] for site in SITES}
    for line in log.read_text().splitlines():
        site, keys = json.loads(line)
        found[site] += [key for key in keys if key not in found[site]]
    return found


def test_equal_provenance_has_equal_keys_at_every_site_of_two_processes(
    processes: Processes,
    models: LongModels,
    recorder: str,
    store: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    full: int,
) -> None:
    folders = [models.adapter("standard", folder=tmp_path / name).path for name in ("one", "two")]
    logs = {name: tmp_path / f"{name}.jsonl" for name in ("one", "two", "salted", "adapted")}

    def launch(name: str, folder: str) -> Launch:
        return Launch(
            models.base,
            store,
            env={key_recorder.SWITCH: str(logs[name])},
            args={"served_model_name": f"served as {name}"},
            adapters={name: folder},
            path=(recorder,),
        )

    def ask(name: str, folder: str, **request: str) -> int:
        step = partial(generate, prompts=prompts, tokens=1, **{"adapter": name, "salt": "salt", **request})
        return stored(processes.run(launch(name, folder), step, written).results[0])

    assert ask("one", folders[0]) == 0
    assert ask("two", folders[1]) == full
    assert ask("salted", folders[1], salt="other") == 0
    assert ask("adapted", models.adapter("inverted").path) == 0
    one, two, salted, adapted = (sites(log) for log in logs.values())
    pages = full // PAGE

    # The first process looks for what it will write, and the second reads what the first has written.
    assert len(one["lookup"]) >= pages
    assert one["lookup"] == two["lookup"]
    assert one["write"][:pages] == one["lookup"][:pages]
    assert two["prefetch"] == two["read"] == one["write"][:pages]
    assert [one["prefetch"], one["read"]] == [[], []]
    # What the second wrote besides is what the first had written.
    assert set(two["write"]) <= set(one["write"])
    for other in (salted, adapted):
        for site in ("lookup", "write"):
            assert len(other[site]) >= pages
            assert set(other[site]).isdisjoint(one["lookup"] + one["write"])
    assert set(salted["lookup"]).isdisjoint(adapted["lookup"])

    # 256 bits each, and in the names of entries no name of the model's.
    named = {entry.name for entry in store.iterdir() if entry.suffix == ".bin"}
    keys = {key for found in (one, two, salted, adapted) for key in found["write"]}
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert named == {f"{key}_kvprov_0_1.bin" for key in keys}
