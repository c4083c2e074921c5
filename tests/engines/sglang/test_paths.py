"""Every way by which an SGLang engine may share KV state is bound or refused, and nothing is left out."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvprov.engines.sglang import paths
from kvprov.errors import BindingError
from tests.support.processes import EngineDiedError
from tests.support.sglang.engine import RELEASE, Engine, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.processes import Processes
from tests.support.sglang.steps import flush, generate, written

pytestmark = pytest.mark.engine

FOREIGN = {"backend_name": "own", "module_path": "json", "class_name": "JSONDecoder"}
GUARD = {"backend_name": "kvprov", "module_path": "kvprov.engines.sglang.guard", "class_name": "Guard"}
NO_HICACHE = {"enable_hierarchical_cache": False, "hicache_storage_backend": None}

SHARES_NOTHING = {
    "memory": {
        "radix_eviction_policy": "which state is dropped first",
        "_radix_eviction_policy_explicitly_set": "as above",
        "radix_eviction_policy_config": "as above",
        "disable_radix_cache": "nothing is kept",
        "enable_page_major_kv_layout": "a layout of the device's pool",
        "enable_unified_memory": "one pool for several kinds of state on one device",
        "hicache_ratio": "sizes",
        "hicache_size": "sizes",
        "hicache_host_memory_fraction": "sizes",
        "hicache_write_policy": "when state is written",
        "hicache_io_backend": "how it is copied",
        "hicache_mem_layout": "bound: kv_representation",
        "hicache_storage_prefetch_policy": "how long reads are waited for",
        "hicache_storage_prefetch_retry_poll_interval": "as above",
        "hicache_storage_prefetch_retry_max_attempts": "as above",
        "hicache_storage_backend_extra_config": "a backend's; the guard's is read",
        "unified_cache_external_linker_config": "a linker's",
        "enable_linker_mla_dedup": "a linker's",
        "hisparse_config": "hisparse's",
        "lmcache_config_file": "LMCache's",
        "flexkv_config_file": "FlexKV's",
    },
    "disagg": {
        "decoupled_spec_bind_endpoint": "of decoupled speculation",
        "decoupled_spec_connect_endpoints": "as above",
        "decoupled_spec_rank": "as above",
        "disaggregation_decode_allocation_policy": "of a decoder",
        "disaggregation_transfer_backend": "of prefillers and decoders",
        "disaggregation_enable_kv_checksum": "as above",
        "disaggregation_bootstrap_port": "as above",
        "disaggregation_ib_device": "as above",
        "disaggregation_decode_enable_radix_cache": "of a decoder",
        "disaggregation_decode_enable_offload_kvcache": "of a decoder",
        "disaggregation_decode_retraction_backup": "of a decoder",
        "disaggregation_decode_host_receive_threshold": "of a decoder",
        "num_reserved_decode_tokens": "of a decoder",
        "disaggregation_decode_extra_slots": "of a decoder",
        "disaggregation_decode_polling_interval": "of a decoder",
        "optimistic_prefill_attempts": "of a prefiller",
        "encoder_only": "it encodes media for engines that are refused, and has no KV state",
        "language_model_only": "media are not encoded at all",
        "encoder_transfer_backend": "of --language-only",
        "encoder_urls": "as above",
        "encoder_bootstrap_port": "as above",
        "encoder_register_urls": "as above",
        "enable_adaptive_dispatch_to_encoder": "as above",
        "enable_pdmux": "prefill and decode on one GPU, in one engine",
        "pdmux_config_path": "as above",
        "sm_group_num": "as above",
    },
}
"""Options of SGLang's that are not in the table, and why."""

IN_TABLE = {
    "memory": {
        "enable_session_radix_cache",
        "radix_cache_backend",
        "enable_hierarchical_cache",
        "hicache_host_memory_mode",
        "hicache_storage_backend",
        "enable_unified_cache_external_linker",
        "unified_cache_external_linker_backend",
        "enable_hisparse",
        "enable_lmcache",
        "enable_flexkv",
    },
    "disagg": {"decoupled_spec_role", "disaggregation_mode", "enable_pd_role_switch", "language_only"},
}


def arguments(**changes: Any) -> Any:
    """Return what `ServerArgs` says of an engine that shares nothing, with `changes`."""
    plain = {
        "hicache_storage_backend": None,
        "hicache_storage_backend_extra_config": None,
        "enable_hierarchical_cache": True,
        "unified_cache_external_linker_backend": "mooncake",
        "disaggregation_mode": "null",
        "decoupled_spec_role": "null",
        "hicache_host_memory_mode": "cache",
    }
    return SimpleNamespace(**plain | changes)


def test_the_table_has_every_backend_of_the_factory() -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    known = set(StorageBackendFactory._registry)
    assert known <= set(paths.BACKENDS), "a release has a backend that nobody has looked at"
    assert known >= {"file", "mooncake"}
    if RELEASE == "0.5.23":
        assert set(paths.BACKENDS) == known | {"dynamic"}


def choices(field: str) -> set[str]:
    """Return the choices that SGLang's own parser allows."""
    from argparse import ArgumentParser

    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    [action] = [action for action in parser._actions if action.dest == field]
    return set(action.choices)


def test_the_table_has_every_choice_of_the_command_line() -> None:
    assert choices("hicache_storage_backend") <= set(paths.BACKENDS)
    assert choices("unified_cache_external_linker_backend") <= set(paths.LINKERS)
    assert choices("disaggregation_mode") == {"null", "prefill", "decode"}
    assert choices("hicache_host_memory_mode") == {"cache", "buffer_only"}


@pytest.mark.parametrize("group", ["disagg", "memory"])
def test_every_option_of_memory_and_disaggregation_was_looked_at(group: str) -> None:
    from sglang.srt.arg_groups import fields

    options = {
        "memory": lambda: fields.memory.Memory.__annotations__,
        "disagg": lambda: fields.disagg.Disagg.__annotations__,
    }[group]()
    assert set(options) - IN_TABLE[group] - set(SHARES_NOTHING[group]) == set()
    assert IN_TABLE[group] - set(options) <= {"enable_pd_role_switch"}


def test_no_cache_of_somebody_elses_is_registered() -> None:
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends

    assert set(registered_radix_cache_backends()) <= {"flexkv"}


def test_an_engine_that_shares_nothing_is_not_refused() -> None:
    paths.check(arguments())
    paths.check(arguments(hicache_host_memory_mode="buffer_only", hicache_storage_backend="file"))
    assert paths.describe(arguments()) == "hicache"
    assert paths.describe(arguments(enable_hierarchical_cache=False)) == "local"


@pytest.mark.parametrize("backend", [*paths.BACKENDS, "of-a-later-release"])
def test_backends(backend: str) -> None:
    wanted = arguments(hicache_storage_backend=backend, hicache_storage_backend_extra_config=json.dumps(FOREIGN))
    guarded = json.dumps({**GUARD, "inner": backend})
    entry = paths.BACKENDS.get(backend)
    if entry is not None and entry.allowed and backend != "dynamic":
        paths.check(wanted)
        paths.check(arguments(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=guarded))
        assert paths.describe(wanted) == f"hicache:{backend}"
        return
    with pytest.raises(BindingError) as refused:
        paths.check(wanted)
    assert backend in refused.value.message
    assert "file, mooncake" in refused.value.advice
    with pytest.raises(BindingError):
        paths.check(arguments(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=guarded))


OPTIONS = [
    ({"enable_lmcache": True}, "--enable-lmcache"),
    ({"enable_flexkv": True}, "--enable-flexkv"),
    ({"radix_cache_backend": "mine"}, "--radix-cache-backend"),
    ({"enable_unified_cache_external_linker": True}, "mooncake"),
    ({"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "mori"}, "mori"),
    ({"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic"}, "dynamic"),
    ({"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "new"}, "new"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"enable_pd_role_switch": True}, "--enable-pd-role-switch"),
    ({"decoupled_spec_role": "drafter"}, "--decoupled-spec-role"),
    ({"language_only": True}, "--language-only"),
    ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend"),
]


@pytest.mark.parametrize(("changes", "named"), OPTIONS)
def test_options(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BindingError) as refused:
        paths.check(arguments(**changes))
    assert named in refused.value.message
    assert "KVPROV_MODE=off" in refused.value.advice


def test_the_prefix_cache_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1")
    if RELEASE == "0.5.20":
        with pytest.raises(BindingError, match="SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"):
            paths.check(arguments())
    else:
        # Later ones do not have it.
        paths.check(arguments())


def config(**changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    plain = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "kvprov",
    }
    return HiCacheStorageConfig(**plain | changes)


def test_the_parallel_sizes_in_names() -> None:
    assert paths.shape(config()) == ""
    assert paths.shape(config(tp_size=2)) == "-tp2"
    assert paths.shape(config(tp_size=4)) != paths.shape(config(tp_size=2))
    assert paths.shape(config(tp_size=2, pp_size=3, attn_cp_size=5)) == "-tp2-pp3-cp5"
    # All ranks of these hold the same.
    assert paths.shape(config(tp_size=4, is_mla_model=True)) == ""
    # Two sizes that share by parts of one size do share.
    assert paths.shape(config(tp_size=2, tp_lcm_size=4)) == paths.shape(config(tp_size=4, tp_lcm_size=4)) == "-tp4"


def test_backends_whose_names_lack_a_rank() -> None:
    made: list[str] = []
    create = paths.wrap_create_backend(lambda name, *_: made.append(name))
    create(None, "nixl", config(tp_size=2), None)
    create(None, "mooncake", config(tp_size=2, pp_size=2), None)
    create(None, "file", config(tp_size=2, pp_size=2, attn_cp_size=2), None)
    assert made == ["nixl", "mooncake", "file"]
    for backend, size in (("nixl", "pp_size"), ("nixl", "attn_cp_size"), ("mooncake", "attn_cp_size")):
        with pytest.raises(BindingError, match=size):
            create(None, backend, config(**{size: 2}), None)
    with pytest.raises(BindingError, match="eic"):
        create(None, "eic", config(), None)
    assert made == ["nixl", "mooncake", "file"]


def file_names(settings: Any, page: str, folder: Path) -> list[str]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    return [HiCacheFile(settings, str(folder))._get_suffixed_key(page)]


def mooncake_names(settings: Any, page: str, folder: Path) -> list[str]:
    del folder
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    store = MooncakeStore.__new__(MooncakeStore)
    # As its constructor does, which wants a server.
    store.config_prefix = settings.model_name
    store.mha_suffix = f"{settings.tp_rank}_{settings.pp_rank}" if settings.pp_size > 1 else f"{settings.tp_rank}"
    store.mem_pool_host = SimpleNamespace(get_page_buffer_meta=lambda _: ([0, 0], [1, 1]))
    names: list[str] = store._tag_keys(store._get_mha_buffer_meta([page], None)[0])
    return names


def nixl_names(settings: Any, page: str, folder: Path) -> list[str]:
    api = SimpleNamespace(nixl_agent=None, nixl_agent_config=None, nixlBind=None)
    with pytest.MonkeyPatch.context() as patched:
        # The package is not installed; it is told what names are, and makes none.
        patched.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
        patched.setitem(sys.modules, "nixl._api", api)
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl
        from sglang.srt.mem_cache.storage.nixl.nixl_utils import NixlFileManager
    store = HiCacheNixl.__new__(HiCacheNixl)
    store.is_mla_model = False
    store.config_suffix = f"_{settings.model_name}_{settings.tp_rank}_{settings.tp_size}"
    manager = NixlFileManager.__new__(NixlFileManager)
    manager.base_dirs = [str(folder)]
    names: list[str] = store._get_key_list_from_meta([page])
    return [*names, *map(manager.get_file_path, names)]


def seaweedfs_names(settings: Any, page: str, folder: Path) -> list[str]:
    del folder
    from sglang.srt.mem_cache.storage.seaweedfs import seaweedfs_store

    names: list[str] = []
    client = SimpleNamespace(
        head_bucket=lambda **_: None,
        put_object=lambda Key, **_: names.append(Key),  # noqa: N803 - S3's own spelling
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(seaweedfs_store, "_make_s3_client", lambda _: client)
        extra = {"seaweedfs_endpoint": "http://127.0.0.1:1", "endpoint": "http://127.0.0.1:1", "bucket": "b"}
        store = seaweedfs_store.SeaweedFSStore(dataclasses.replace(settings, extra_config=extra))
    assert store.set(page, torch.zeros(1))
    return names


NAMERS = {"file": file_names, "mooncake": mooncake_names, "nixl": nixl_names, "seaweedfs": seaweedfs_names}


@pytest.mark.parametrize("backend", sorted(NAMERS))
def test_names_hold_page_hashes_whole_and_tell_ranks_and_sizes_apart(backend: str, tmp_path: Path) -> None:
    if backend == "seaweedfs" and RELEASE == "0.5.20":
        pytest.skip("0.5.20 does not have it")
    pages = ["0" * 63 + digit for digit in "12"]
    shapes = [config(), *(config(tp_size=2, tp_rank=rank) for rank in (0, 1)), config(tp_size=4)]
    seen: set[str] = set()
    count = 0
    for shape in shapes:
        shape.model_name += paths.shape(shape)
        for page in pages:
            names = NAMERS[backend](shape, page, tmp_path)
            assert names
            assert all(page in name for name in names)
            seen |= set(names)
            count += len(names)
    assert len(seen) == count


def test_every_bound_backend_is_compared() -> None:
    bound = {name for name, entry in paths.BACKENDS.items() if entry.treatment is paths.Treatment.NAMESPACE}
    assert bound == set(NAMERS)


REAL: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"hicache_storage_backend": "eic"}, "the HiCache storage backend 'eic'"),
    "dynamic": (
        {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps({**FOREIGN, "prefetch_threshold": 16}),
        },
        "the HiCache storage backend 'dynamic'",
    ),
    "guarded": (
        {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps({**GUARD, "inner": "sim"}),
        },
        "the HiCache storage backend 'sim'",
    ),
    "linker": ({**NO_HICACHE, "enable_unified_cache_external_linker": True}, "the external linker 'mooncake'"),
    "lmcache": ({**NO_HICACHE, "enable_lmcache": True}, "--enable-lmcache"),
    "decode": (
        {**NO_HICACHE, "disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"},
        "--disaggregation-mode decode",
    ),
}


def test_real_engines_refuse_before_they_load_a_model(processes: Processes, models: LongModels, store: Path) -> None:
    runs = [(Launch(models.base, store, args=args), ()) for args, _ in REAL.values()]
    for (_, what), died in zip(REAL.values(), processes.run_all(runs), strict=True):
        assert isinstance(died, EngineDiedError)
        assert f"kvprov does not bind {what}: KV state would be shared without regard to provenance" in died.log
        assert "Load weight begin" not in died.log


def attach(engine: Engine, backend: str, extra_config: str) -> tuple[bool, str]:
    """Let a running engine open a storage backend, as the HTTP endpoint does."""
    manager = engine.engine.tokenizer_manager
    result = engine.engine.loop.run_until_complete(
        manager.attach_hicache_storage(
            hicache_storage_backend=backend, hicache_storage_backend_extra_config_json=extra_config
        )
    )
    return result.success, result.message


def test_a_backend_that_is_attached_while_the_engine_runs(
    processes: Processes, models: LongModels, store: Path
) -> None:
    prompt = models.random_prompt(200, seed=3)
    ask = partial(generate, prompts=[prompt])
    launch = Launch(models.base, store)
    own = json.dumps({"prefetch_threshold": 16, "file_storage_path": str(store)})
    run = processes.run(
        Launch(models.base, store, args={"hicache_storage_backend": None}),
        partial(attach, backend="sim", extra_config=own),
        partial(attach, backend="dynamic", extra_config=json.dumps(FOREIGN)),
        partial(attach, backend="file", extra_config=own),
        ask,
        written,
        flush,
        ask,
    )
    (sim, why), (foreign, why_foreign), (file, _), *_, [warm] = run.results
    assert (sim, foreign, file) == (False, False, True)
    assert "kvprov does not bind the HiCache storage backend 'sim'" in why
    assert "kvprov does not bind the HiCache storage backend 'dynamic'" in why_foreign
    # What was attached is bound as what is there from the start.
    assert warm.storage == loadable(len(prompt))
    other = processes.run(launch, ask).results[0][0]
    assert other.storage == loadable(len(prompt))
    assert (other.tokens, warm.tokens) == (run.results[3][0].tokens,) * 2


def test_a_host_that_only_passes_on(processes: Processes, models: LongModels, store: Path, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    models.copy_base(Path(other))
    models.perturb(Path(other))
    ask = partial(generate, prompts=[models.random_prompt(200, seed=4)])
    args = {"hicache_host_memory_mode": "buffer_only"}
    [before], _, _, [warm] = processes.run(Launch(models.base, store, args=args), ask, written, flush, ask).results
    runs = processes.run_all(
        [
            (Launch(other, mode="off"), (ask,)),
            (Launch(models.base, store, args=args), (ask,)),
            (Launch(other, store, args=args), (ask,)),
        ]
    )
    [alone], [again], [foreign] = (run.results[0] for run in runs if not isinstance(run, EngineDiedError))
    assert (before.storage, warm.storage, again.storage, foreign.storage) == (0, 192, 192, 0)
    assert before.tokens == warm.tokens == again.tokens
    assert foreign.tokens == alone.tokens
    assert foreign.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert foreign.logprobs != pytest.approx(again.logprobs, abs=1e-4)
