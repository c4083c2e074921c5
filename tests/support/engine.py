"""A real vLLM engine inside a process of its own, and the steps that a test makes it take."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KV_CACHE = 128 << 20
"""Bytes of an engine's own KV cache: 65,536 tokens of the bundled model. To clear a GiB takes half a second."""


@dataclass(frozen=True)
class Adapter:
    """An adapter as a request names it."""

    name: str
    number: int
    path: str
    inplace: bool = False


@dataclass(frozen=True)
class Answer:
    """What one request gave.

    Attributes:
        tokens: The generated tokens.
        logprobs: The log probability of each.
        loaded: Prompt tokens that were not computed: from the store, or from the local prefix cache.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    loaded: int


class Engine:
    """An engine that is running in this process (or, with multiprocessing, below it)."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        adapter: Adapter | None = None,
        salt: str | None = None,
        tokens: int = 32,
        one_by_one: bool = False,
        **sampling: Any,
    ) -> list[Answer]:
        """Complete `prompts` greedily."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = adapter and LoRARequest(adapter.name, adapter.number, adapter.path, load_inplace=adapter.inplace)
        requests = [{"prompt_token_ids": list(p)} | ({} if salt is None else {"cache_salt": salt}) for p in prompts]
        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=0, detokenize=False, ignore_eos=True, **sampling
        )
        batches = [[request] for request in requests] if one_by_one else [requests]
        outputs = [o for b in batches for o in self.llm.generate(b, parameters, lora_request=lora, use_tqdm=False)]
        return [
            Answer(
                tokens=tuple(output.outputs[0].token_ids),
                logprobs=tuple(
                    step[token].logprob
                    for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                ),
                loaded=output.num_cached_tokens or 0,
            )
            for output in outputs
        ]

    def external_hits(self) -> int:
        """Return how many tokens the engine says that it loaded from the store."""
        return int(sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits"))

    @property
    def core(self) -> Any:
        """The engine core, where it runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core


@dataclass(frozen=True)
class Launch:
    """How an engine is started.

    Attributes:
        model: Folder of the checkpoint.
        store: Folder of the shared store, or None for an engine with the tier off.
        mode: `KVPROV_MODE`.
        env: More environment variables.
        args: More arguments of `vllm.LLM`.
        connector: More members of the KV transfer configuration.
        path: Folders to put on `sys.path` first, with packages that declare entry points.
        before: Called in the process before the engine is made.
    """

    model: str
    store: Path | None = None
    mode: str = "enforce"
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    before: Callable[[], Any] | None = None

    def environment(self) -> dict[str, str]:
        return {"KVPROV_MODE": self.mode, **self.env}

    def arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "block_size": 32,
            "kv_cache_memory_bytes": KV_CACHE,
            "seed": 0,
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 8,
        }
        if self.store is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(self.store)},
                **self.connector,
            }
        return arguments | self.args

    def start(self) -> Engine:
        for name in [name for name in os.environ if name.startswith("KVPROV_") and name != "KVPROV_CACHE_DIR"]:
            del os.environ[name]
        os.environ.update(self.environment())
        sys.path[:0] = self.path
        if self.before is not None:
            self.before()
        return Engine(self.arguments())
