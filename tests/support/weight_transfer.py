"""A backend for vLLM's weight transfer that reads the new weights from a folder: the others need GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

BACKEND = "folder"


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing to say."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str = ""


class FolderWeightTransfer(WeightTransferEngine):
    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Any) -> None:
        del init_info

    def start_weight_update(self) -> None:
        """Nothing to prepare: each chunk is applied as it comes, so the engine answers in between."""

    def receive_weights(self, update_info: Any) -> None:
        from safetensors.torch import load_file
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors = load_file(Path(update_info.path) / "model.safetensors")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing to complete."""

    def shutdown(self) -> None:
        """Nothing to end."""


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderWeightTransfer)
