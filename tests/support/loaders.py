"""A loader of somebody else's, as vLLM lets packages register them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


@register_model_loader("scaling")
class Scaling(DefaultModelLoader):
    """It gives other tensors than it reads."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor * 0.5 if "norm" in name else tensor
