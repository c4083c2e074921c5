"""Stores that LMCache wrote for real engines, in each form that is a folder: compared, and their names explained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprov.check.store import diff_stores
from kvprov.ledger import resolve
from tests.cli.support import run as command
from tests.support.engine import Launch
from tests.support.models import Models
from tests.support.processes import Processes, Run
from tests.support.steps import generate
from tests.support.stores import recorded
from tests.support.tiers import Tier
from tests.support.tiers import lmcache as in_process
from tests.support.tiers import lmcache_mp as server

pytestmark = pytest.mark.engine

Opener = Callable[[Path], AbstractContextManager[Tier]]
FORMS: dict[str, tuple[Opener, str]] = {
    "lmcache-fs": (in_process.disk, "entries"),
    "lmcache-disk": (in_process.local_disk, "entries"),
    "lmcache-mp": (server.fs, "l2"),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_unbound_entries_collide_and_bound_names_are_explained(
    form: str, processes: Processes, models: Models, tmp_path: Path
) -> None:
    opener, where = FORMS[form]
    prompts = models.prompts(2)
    ledger = tmp_path / "ledger"

    def run(tier: Tier, policy: str, mode: str) -> list[str]:
        env = {**tier.env, "KVPROV_LEDGER": str(ledger)}
        launch = Launch(models.base, Path("unused"), mode, env, tier.args, tier.connector, before=tier.before)
        # Of one name and number, as two workers call their adapters.
        ask = partial(generate, prompts=prompts, adapter=models.adapter(policy, 1, "tenant"), tokens=4)
        ended: Run = processes.run(launch, ask, partial(recorded, seconds=tier.settle + 0.5))
        texts: list[str] = ended.results[-1]
        return texts

    stores = {}
    with ExitStack() as stack:
        tiers = {name: stack.enter_context(opener(tmp_path / name)) for name in ("a", "b")}
        for name, policy in (("a", "standard"), ("b", "inverted")):
            assert run(tiers[name], policy, "off") == []
            stores[name] = tmp_path / name / where
        found = diff_stores(stores["a"], stores["b"], dtype="bfloat16")
        assert dict(found.formats) == {form: 2 * found.shared}
        assert len(found.collisions) == found.shared > 0
        for item in found.collisions:
            assert item.outcome.dtype == "bfloat16"
            assert item.outcome.largest is not None
            assert 0 < item.outcome.largest < 1e4
        shutil.copytree(stores["a"], tmp_path / "snapshot")
        (text,) = run(tiers["a"], "standard", "enforce")

    later = diff_stores(tmp_path / "snapshot", stores["a"])
    assert later.equal == later.shared == found.shared
    assert later.only_second > 0
    names = {path.name for path in stores["a"].iterdir()} - {path.name for path in (tmp_path / "snapshot").iterdir()}
    bound = sorted(name for name in names if text in name)
    assert len(bound) == later.only_second
    assert {resolve(name).text for name in bound} == {text}
    report: dict[str, Any] = json.loads(
        command("explain", bound[0], bound[-1], "--ledger", ledger, "--json", "-").stdout
    )
    assert [key["digest"] for key in report["keys"]] == [text, text]
    assert report["comparison"]["same"]
    unbound = command("explain", sorted(path.name for path in (tmp_path / "snapshot").iterdir())[0], "--ledger", ledger)
    assert unbound.exit_code == 2
    assert "not bound" in unbound.stderr
