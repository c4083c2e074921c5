"""Engines that are to be bound, and are not, do not start; engines that are not to be bound are stock's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.packages import install
from tests.support.processes import EngineDiedError
from tests.support.sglang.engine import PAGE, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.plugins import GROUP
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import flush, generate, stored, written

pytestmark = pytest.mark.engine

GUARDED: dict[str, Any] = {
    "args": {"hicache_storage_backend": "dynamic"},
    "extra_config": {
        "backend_name": "kvprov",
        "module_path": "kvprov.engines.sglang.guard",
        "class_name": "Guard",
        "inner": "file",
    },
}


@pytest.fixture(scope="module")
def prompt(models: LongModels) -> list[int]:
    return models.random_prompt(200, seed=11)


def test_the_guard_opens_the_inner_backend_where_keys_are_bound(
    processes: Processes, models: LongModels, prompt: list[int], store: Path
) -> None:
    ask = partial(generate, prompts=[prompt])
    guarded = processes.run(Launch(models.base, store, **GUARDED), ask, flush, ask)
    assert stored(guarded.results[-1]) == loadable(len(prompt))
    # It is the inner backend itself, with its keys: an engine that names it shares.
    [named] = processes.run(Launch(models.base, store), ask).results
    assert stored(named) == loadable(len(prompt))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mode": None, "env": {"KVPROV_MODE": "enforce"}}, "is not in effect in this process"),
        ({"mode": "off"}, "KVPROV_MODE is off"),
        ({"extra_config": GUARDED["extra_config"] | {"inner": None}}, "does not say which backend it guards"),
    ],
    ids=["without the plugin", "switched off", "without an inner backend"],
)
def test_the_guard_refuses(
    processes: Processes, models: LongModels, store: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(EngineDiedError) as raised:
        processes.run(Launch(models.base, store, **GUARDED | changes))
    assert why in raised.value.log
    assert list(store.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"KVPROV_UNSAFE_WITHHOLD": "nonsense"}, "nonsense"),
        ({"KVPROV_SECRET": "short"}, "fewer than 16"),
        ({"KVPROV_REQUIRE_SECRET": "yes"}, "there is no fleet secret"),
        ({"KVPROV_NONSENSE": "1"}, "is not a setting"),
    ],
    ids=["withheld", "secret", "no secret", "setting"],
)
def test_a_setting_that_cannot_be_used_stops_the_engine(
    processes: Processes, models: LongModels, env: dict[str, str], why: str
) -> None:
    # SGLang logs plugins that raise, and serves without them.
    with pytest.raises(EngineDiedError) as raised:
        processes.run(Launch(models.base, env=env))
    assert why in raised.value.log


def test_mode_off_leaves_the_keys_of_an_engine_without_kvprov(
    processes: Processes, models: LongModels, prompt: list[int], tmp_path: Path
) -> None:
    names = {}
    asks = [partial(generate, prompts=[prompt], salt=salt, tokens=2) for salt in (None, "a")]
    for mode in ("off", None, "enforce"):
        store = tmp_path / f"store-{mode}"
        store.mkdir()
        processes.run(Launch(models.base, store, mode), *asks, written)
        names[mode] = {file.name for file in store.iterdir()}
    assert len(names["off"]) == 2 * (len(prompt) // PAGE)
    assert names["off"] == names[None]
    assert not names["off"] & names["enforce"]


BREAKS = '''
"""Somebody else's plugin, which goes around kvprov once all plugins are loaded."""

import functools
import os


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry.apply_hooks

    def apply_and_break():
        apply()
        go_around()

    HookRegistry.apply_hooks = staticmethod(apply_and_break)


def go_around():
    from sglang.srt.managers import schedule_batch

    init = schedule_batch.Req.__init__

    @functools.wraps(init)
    def keep_namespace(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.extra_key, self.cache_salt = kwargs.get("extra_key"), kwargs.get("cache_salt")

    def replaced(self):
        raise AssertionError("never called")

    kind = os.environ["TEST_BREAKS"]
    if kind == "wraps":
        schedule_batch.Req.__init__ = keep_namespace
    elif kind == "replaces":
        schedule_batch.Req.build_rebootstrap_payload = replaced
    elif kind == "unbars":
        del schedule_batch.Req.skip_radix_cache_insert
'''


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("wraps", "a request does not carry what it is bound to"),
        ("replaces", "Something replaced sglang.srt.managers.schedule_batch.Req.build_rebootstrap_payload"),
        ("unbars", "requests that must not be kept are not barred"),
    ],
)
def test_a_plugin_that_goes_around_kvprov_stops_the_engine(
    processes: Processes, models: LongModels, tmp_path: Path, kind: str, why: str
) -> None:
    package = install(tmp_path / "package", "breaks", BREAKS, {"breaks": "register"}, group=GROUP)
    with pytest.raises(EngineDiedError) as raised:
        processes.run(Launch(models.base, env={"TEST_BREAKS": kind}, path=(package,)))
    assert why in raised.value.log


def test_weights_without_identity_keep_to_themselves_and_a_label_lets_them_share(
    processes: Processes, models: LongModels, prompt: list[int], store: Path
) -> None:
    ask = partial(generate, prompts=[prompt])
    args = {"load_format": "dummy"}
    unknown = processes.run(Launch(models.base, store, args=args), ask, ask, written, flush, ask)
    first, again, pages, _, after = unknown.results
    # Its own device keeps what it computed; the store gets nothing.
    assert stored(first) == stored(after) == 0
    assert again[0].device == loadable(len(prompt))
    assert pages == 0
    assert "bypasses the shared tier: weights" in unknown.log
    labelled = Launch(models.base, store, args=args, env={"KVPROV_WEIGHTS_LABEL": "dummy/1"})
    processes.run(labelled, ask, written)
    [shared] = processes.run(labelled, ask).results
    assert stored(shared) == loadable(len(prompt))


def test_the_startup_line_says_what_is_bound(processes: Processes, models: LongModels, store: Path) -> None:
    log = processes.run(Launch(models.base, store, env={"KVPROV_DIGEST_BITS": "128"})).log
    [line] = [line for line in log.splitlines() if "kvprov: mode=" in line]
    assert "mode=enforce path=hicache:file" in line
    assert "bits=128" in line
    for name in ("weights", "precision", "model_config", "kv_representation", "adapter", "sharing_domain"):
        assert name in line
