"""A real SGLang engine with HiCache, and the steps that a test makes it take."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.sglang.trainer import Trainer

RELEASE = version("sglang") if find_spec("sglang") else ""
"""SGLang's release; empty where it is not installed. To import SGLang for it takes 10 s."""
PAGE = 16
"""Tokens of a page, where a test does not ask for others."""
TOKENS = 8192
"""Tokens that an engine keeps on its device; it keeps twice as many on the host."""


@dataclass(frozen=True)
class Answer:
    """What one request gave.

    Attributes:
        tokens: The generated tokens.
        logprobs: The log probability of each.
        cached: Prompt tokens that were not computed.
        device: Those of them that were still on the device.
        host: Those that were in the host's memory.
        storage: Those that were read from the store.
        weight_version: The engine's own name of its weights.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    device: int
    host: int
    storage: int
    weight_version: str | None


class Engine:
    """An engine that is running in this process and its children.

    Attributes:
        engine: SGLang's own object.
        store: Folder of the shared store, or None.
    """

    def __init__(self, arguments: dict[str, Any], store: Path | None = None) -> None:
        from sglang import Engine as Sglang

        self.engine = Sglang(**arguments)
        self.store = store

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        adapter: str | None = None,
        salt: str | None = None,
        extra_key: str | None = None,
        tokens: int = 8,
        one_by_one: bool = False,
        timeout: float = 60,
        **request: Any,
    ) -> list[Answer]:
        """Complete `prompts` greedily, all at a time unless `one_by_one`.

        Raises:
            TimeoutError: A request has no answer after `timeout` seconds.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def complete(prompt: Sequence[int]) -> Any:
            wanted = GenerateReqInput(
                input_ids=list(prompt),
                sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
                return_logprob=True,
                lora_path=adapter,
                cache_salt=salt,
                extra_key=extra_key,
                **request,
            )
            return await anext(self.engine.tokenizer_manager.generate_request(wanted, None))

        async def complete_all(some: Sequence[Sequence[int]]) -> list[Any]:
            try:
                return await asyncio.wait_for(asyncio.gather(*map(complete, some)), timeout)
            except TimeoutError as error:
                raise TimeoutError(f"no answer within {timeout} s") from error

        batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        return [answer(output) for batch in batches for output in self._wait(complete_all(batch))]

    def flush(self) -> None:
        """Forget what the device and the host hold. The store keeps all."""
        # It is refused while pages are being written.
        self.wait_until_written()
        deadline = time.monotonic() + 20
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise TimeoutError("the engine did not flush its cache")
            time.sleep(0.02)

    def pages(self) -> int:
        """Return how many pages (with one file each) the store holds."""
        return sum(entry.name.endswith(".bin") for entry in os.scandir(self.store)) if self.store else 0

    def wait_until_written(self, pages: int | None = None, *, quiet: float = 0.3, timeout: float = 20) -> int:
        """Wait until the store holds `pages`, or until it has not grown for `quiet` seconds. Return how many it holds.

        Raises:
            TimeoutError: It holds fewer than `pages` after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        held, since = self.pages(), time.monotonic()
        while self.store is not None:
            if pages is not None and held >= pages:
                break
            if pages is None and time.monotonic() - since > quiet:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the store holds {held} pages; {pages} were expected")
            time.sleep(0.02)
            now = self.pages()
            if now != held:
                held, since = now, time.monotonic()
        return held

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path` under `name`."""
        _succeeded(self.engine.load_lora_adapter(name, path))

    def load_adapter_from_tensors(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path` as tensors, as a trainer does: no path is known to the engine."""
        from safetensors.torch import load_file

        tensors = load_file(Path(path) / "adapter_model.safetensors")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        _succeeded(self.engine.load_lora_adapter_from_tensors(name, tensors, config))

    def unload_adapter(self, name: str) -> None:
        _succeeded(self.engine.unload_lora_adapter(name))

    def update_from_disk(self, path: str, *, flush_cache: bool = True, weight_version: str | None = None) -> None:
        """Exchange the weights for those of the checkpoint in `path`."""
        self._settle(flush_cache)
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        wanted = UpdateWeightFromDiskReqInput(model_path=path, flush_cache=flush_cache, weight_version=weight_version)
        _done(self._wait(self.engine.tokenizer_manager.update_weights_from_disk(wanted, None)))

    def update_from_tensors(self, path: str, *, flush_cache: bool = True, weight_version: str | None = None) -> None:
        """Exchange the weights for those of the checkpoint in `path`, given as tensors."""
        self._settle(flush_cache)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        wanted = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self.engine._serialize_tensors_per_rank(list(_weights(path).items()), None),
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        with _Update(self.engine):
            _done(self._wait(self.engine.tokenizer_manager.update_weights_from_tensor(wanted, None)))

    def update_from_trainer(self, path: str, *, flush_cache: bool = True, weight_version: str | None = None) -> None:
        """Exchange the weights for those of the checkpoint in `path`, sent by another process over a process group."""
        self._settle(flush_cache)
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput, UpdateWeightsFromDistributedReqInput

        manager, port, group = self.engine.tokenizer_manager, free_port(), f"trainer-{time.monotonic_ns()}"
        weights = _weights(path)
        join = InitWeightsUpdateGroupReqInput(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=group, backend="gloo"
        )
        update = UpdateWeightsFromDistributedReqInput(
            names=list(weights),
            dtypes=[str(t.dtype).removeprefix("torch.") for t in weights.values()],
            shapes=[list(t.shape) for t in weights.values()],
            group_name=group,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        with Trainer(path, port, group), _Update(self.engine):
            _done(self._wait(manager.init_weights_update_group(join, None)))
            _done(self._wait(manager.update_weights_from_distributed(update, None)))
        self.engine.destroy_weights_update_group(group)

    def _settle(self, flush_cache: bool) -> None:
        # While pages are being written the flush fails, and ends 0.5.20.
        if flush_cache:
            self.wait_until_written()

    def _wait(self, awaitable: Any) -> Any:
        return self.engine.loop.run_until_complete(awaitable)


class _Update:
    """0.5.23 wants updates between a begin and an end; 0.5.20 has neither."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine if hasattr(engine, "begin_weight_update") else None

    def __enter__(self) -> None:
        if self._engine is not None:
            self._engine.begin_weight_update()

    def __exit__(self, *_error: object) -> None:
        if self._engine is not None:
            self._engine.end_weight_update()


def _weights(path: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


def _succeeded(result: Any) -> None:
    if not result.success:
        raise RuntimeError(result.error_message)


def _done(outcome: tuple[Any, ...]) -> None:
    success, message, *_ = outcome
    if not success:
        raise RuntimeError(message)


def answer(output: dict[str, Any]) -> Answer:
    """Return what SGLang's own answer to a request says."""
    about = output["meta_info"]
    details = about.get("cached_tokens_details") or {}
    return Answer(
        tokens=tuple(output["output_ids"]),
        logprobs=tuple(entry[0] for entry in about["output_token_logprobs"]),
        cached=about["cached_tokens"],
        device=details.get("device", 0),
        host=details.get("host", 0),
        storage=details.get("storage", 0),
        weight_version=about.get("weight_version"),
    )


@dataclass(frozen=True)
class Launch:
    """How an engine is started.

    Attributes:
        model: Folder of the checkpoint.
        store: Folder of the shared store, or None for an engine without one.
        mode: `KVPROV_MODE`, or None for an engine in which kvprov is not loaded.
        env: More environment variables. What SGLang reads while it is imported is read before.
        args: Other values of SGLang's `ServerArgs`.
        adapters: Adapters to load from the start, by name: their folders.
        extra_config: More members of `hicache_storage_backend_extra_config`.
        path: Folders to put on `sys.path` first, with packages that declare entry points.
        children: Processes that SGLang and trainers may start.
    """

    model: str
    store: Path | None = None
    mode: str | None = "enforce"
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    extra_config: dict[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    children: int = 4

    def environment(self) -> dict[str, str]:
        environment = {"KVPROV_MODE": self.mode or "off"}
        if self.mode is None:
            environment["SGLANG_PLUGINS"] = "cpu,coarse"
        if self.store is not None:
            # 0.5.20 knows no other way to say it.
            environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.store)
        return environment | self.env

    def arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model_path": self.model,
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "skip_server_warmup": True,
            "skip_tokenizer_init": True,
            "max_total_tokens": TOKENS,
            "mem_fraction_static": 0.1,
            "page_size": PAGE,
            "random_seed": 0,
            "log_level": "info",
            "enable_cache_report": True,
        }
        if self.store is not None:
            arguments |= {
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2,
                "hicache_io_backend": "direct",
                "hicache_mem_layout": "layer_first",
                "hicache_write_policy": "write_through",
                "hicache_storage_backend": "file",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 16, **self.extra_config}),
            }
        if self.adapters or self.args.get("enable_lora"):
            arguments |= {
                "enable_lora": True,
                "lora_backend": "torch_native",
                "max_lora_rank": 8,
                "lora_target_modules": ["q_proj", "v_proj"],
                "max_loras_per_batch": 4,
                "lora_paths": [f"{name}={path}" for name, path in self.adapters.items()],
            }
        return arguments | self.args

    def start(self) -> Engine:
        for name in [name for name in os.environ if name.startswith("KVPROV_") and name != "KVPROV_CACHE_DIR"]:
            del os.environ[name]
        os.environ.update(self.environment())
        sys.path[:0] = self.path
        return Engine(self.arguments(), self.store)
