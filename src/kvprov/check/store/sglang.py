"""Workers of SGLang's, in processes of their own, for `kvprov store check`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvprov.check.bench import link_files
from kvprov.check.store.check import UNBOUND, Worker
from kvprov.check.store.served import ROPE, Model, documents, read_object
from kvprov.check.store.worker_process import Runner, in_a_process, run_all

WORKER_MODULE: Final = "kvprov.check.store.sglang_worker"
TITLE: Final = "SGLang with HiCache's file backend"
NARROW_KV: Final = "fp8_e5m2"
"""The element type of the KV cache in workers that differ in `kv_representation`."""

SEED: Final = 1
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    # Else the order of additions may differ from run to run.
    "OMP_NUM_THREADS": "1",
}


class SglangFleet:
    """Workers of SGLang's over HiCache's file backend: see `kvprov.check.store.check.Fleet`.

    Checkpoint and adapter are at paths of their own, where their content is exchanged, as by an upload in place.

    Args:
        model: What they serve.
        work: A folder for requests, logs, the checkpoint and the adapter.
        run: Runs one worker; by default in a process of its own.
        parallel: How many workers may run at a time.
    """

    def __init__(self, model: Model, work: Path, run: Runner | None = None, parallel: int = 1) -> None:
        self.title = TITLE
        self.dimensions: Sequence[str] = (
            *(("adapter",) if model.adapters is not None else ()),
            "weights",
            "model_config",
            "kv_representation",
            "sharing_domain",
        )
        self._model = model
        self._work = work
        self._run = run or in_a_process(WORKER_MODULE, work, _ENVIRONMENT, "SGLANG_PLUGINS")
        self._parallel = parallel
        self._documents = documents(model.folder)

    def write(self, workers: Sequence[Worker]) -> None:
        """See `Fleet.write`. Those with other weights, then those with the other adapter come last."""
        for exchanged in (None, "weights", "adapter"):
            batch = [
                worker
                for worker in workers
                if (worker.differs if worker.differs in ("weights", "adapter") else None) == exchanged
            ]
            if not batch:
                continue
            self._place(exchanged)
            run_all(self._run_one, batch, self._parallel)

    def _run_one(self, worker: Worker) -> None:
        self._run(worker, self._request(worker), worker.settings())

    @property
    def _checkpoint(self) -> Path:
        return self._work / "model"

    @property
    def _adapter(self) -> Path:
        return self._work / "adapter"

    def _place(self, exchanged: str | None) -> None:
        link_files(self._second_weights() if exchanged == "weights" else self._model.folder, self._checkpoint)
        if self._model.adapters is not None:
            shutil.rmtree(self._adapter, ignore_errors=True)
            shutil.copytree(self._model.adapters[exchanged == "adapter"], self._adapter)

    def _second_weights(self) -> Path:
        if self._model.weights is not None:
            return self._model.weights
        from kvprov.check.packages import need_packages
        from kvprov.check.weights import perturb

        need_packages()
        return perturb(self._model.folder, self._work / "perturbed", SEED)

    def _request(self, worker: Worker) -> dict[str, Any]:
        arguments = dict(self._model.arguments)
        if worker.differs == "model_config":
            arguments["json_model_override_args"] = json.dumps(dict(ROPE))
        if worker.differs == "kv_representation":
            arguments["kv_cache_dtype"] = NARROW_KV
        return {
            "model": str(self._checkpoint),
            "store": str(worker.store),
            "bound": worker.binding != UNBOUND,
            "adapter": None if self._model.adapters is None else {"name": "adapter", "folder": str(self._adapter)},
            "salt": "second" if worker.differs == "sharing_domain" else "first",
            "arguments": arguments,
            "documents": self._documents,
        }


def with_queries(adapter: Path, at: Path) -> Path:
    """Write an adapter that SGLang can load, and that does what `adapter` does, into the folder `at`.

    SGLang joins the projections of an attention layer, and takes for granted that an adapter which has one for values
    has one for queries. Where it is missing, zeros are added, of the shape of that for values: it is made for models
    that have as many heads of each, as the bundled one.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(adapter, at)
    tensors: dict[str, Any] = {}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        # Its keys only: it is no mapping.
        for name in sorted(file.keys()):
            tensors[name] = file.get_tensor(name)
    for name, query in list(_missing(tensors)):
        tensors[query] = tensors[name].clone().zero_()
    save_file(tensors, at / "adapter_model.safetensors", metadata={"format": "pt"})
    config = read_object(adapter / "adapter_config.json")
    config["target_modules"] = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    (at / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return at


def _missing(tensors: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in tensors:
        query = name.replace("v_proj", "q_proj")
        if query not in tensors:
            yield name, query
