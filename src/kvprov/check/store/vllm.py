"""Workers of vLLM's, in processes of their own, for `kvprov store check`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvprov.check.store.check import UNBOUND, Worker
from kvprov.check.store.served import ROPE, Model, documents, read_object
from kvprov.check.store.worker_process import Runner, in_a_process, run_all
from kvprov.engines.vllm.connectors import EXPLICIT_MODULE

WORKER_MODULE: Final = "kvprov.check.store.vllm_worker"
MAX_MODEL_LEN: Final = 256
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One process, whose end is the engine's.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Else the order of additions may differ from run to run.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}

Connector = Callable[[Path], Mapping[str, Any]]
"""Gives vLLM's KV transfer configuration for a store in a folder."""


def example(store: Path) -> dict[str, Any]:
    """ExampleConnector over a folder. It runs everywhere."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }


def fs_tier(store: Path) -> dict[str, Any]:
    """OffloadingConnector with its fs tier. vLLM runs it on GPUs alone."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "fs", "root_dir": str(store)}],
        },
    }


CONNECTORS: Final[Mapping[str, Connector]] = {"example": example, "vllm-fs": fs_tier}


def _rank(folder: Path) -> int:
    rank = read_object(folder / "adapter_config.json").get("r")
    return next((r for r in _RANKS if isinstance(rank, int) and r >= rank), _RANKS[-1])


class VllmFleet:
    """Workers of vLLM's over one connector: see `kvprov.check.store.check.Fleet`.

    Args:
        model: What they serve.
        connector: How they reach their store.
        title: Engine and connector, for people.
        work: A folder for requests, logs and the adapter.
        run: Runs one worker; by default in a process of its own.
        parallel: How many workers may run at a time.
    """

    def __init__(
        self,
        model: Model,
        connector: Connector,
        title: str,
        work: Path,
        run: Runner | None = None,
        parallel: int = 1,
    ) -> None:
        self.title = title
        self.dimensions: Sequence[str] = (
            *(("adapter",) if model.adapters is not None else ()),
            "precision",
            "model_config",
            "sharing_domain",
        )
        self._model = model
        self._connector = connector
        self._work = work
        self._run = run or in_a_process(WORKER_MODULE, work, _ENVIRONMENT, "VLLM_PLUGINS")
        self._parallel = parallel
        self._documents = documents(model.folder)

    def write(self, workers: Sequence[Worker]) -> None:
        """See `Fleet.write`. Those with the second adapter come last: it is exchanged at its path, under its name."""
        for which in (0, 1):
            self._place_adapter(which)
            batch = [worker for worker in workers if (worker.differs == "adapter") == bool(which)]
            run_all(self._run_one, batch, self._parallel)

    def _run_one(self, worker: Worker) -> None:
        self._run(worker, self._request(worker), worker.settings())

    @property
    def _adapter(self) -> Path:
        return self._work / "adapter"

    def _place_adapter(self, which: int) -> None:
        if self._model.adapters is not None:
            shutil.rmtree(self._adapter, ignore_errors=True)
            shutil.copytree(self._model.adapters[which], self._adapter)

    def _request(self, worker: Worker) -> dict[str, Any]:
        arguments = dict(self._model.arguments)
        if worker.differs == "precision":
            arguments["quantization"] = "fp8_per_channel"
        if worker.differs == "model_config":
            arguments["hf_overrides"] = dict(ROPE)
        adapter = None
        if self._model.adapters is not None:
            ranks = [_rank(folder) for folder in self._model.adapters]
            adapter = {"name": "adapter", "folder": str(self._adapter), "rank": max(ranks)}
        connector = dict(self._connector(worker.store))
        if worker.binding != UNBOUND:
            # So that vLLM does not start where kvprov's plugin is not in effect, rather than run unbound.
            connector["kv_connector_module_path"] = EXPLICIT_MODULE
        return {
            "model": str(self._model.folder),
            "store": str(worker.store),
            "connector": connector,
            "adapter": adapter,
            "salt": "second" if worker.differs == "sharing_domain" else "first",
            "arguments": arguments,
            "max_model_len": MAX_MODEL_LEN,
            "documents": self._documents,
        }
