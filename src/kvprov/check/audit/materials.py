"""The files of scenarios: a checkpoint of a few bytes and an adapter, written where a scenario says they are.

An engine's configuration reads them. No tensor in them is ever computed with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvprov.check.audit.scenario import Adapter, Scenario

LAYERS: Final = 2
HEADS: Final = 2
HEAD_SIZE: Final = 32
HIDDEN: Final = HEADS * HEAD_SIZE
RANK: Final = 4


def _config(scenario: Scenario) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rope_theta": scenario.rope_theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | ({"sliding_window": scenario.sliding_window} if scenario.sliding_window else {})


class Materials:
    """Writes the files of one scenario at a time.

    Args:
        root: The audit's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[Path, object] = {}

    def model(self, scenario: Scenario) -> Path:
        """Return the folder of the scenario's checkpoint, as it is in that scenario."""
        folder = self._root / scenario.model_folder / scenario.model_name
        self._once(folder, scenario.weights, "model.safetensors", scenario.weights, {"model.embed_tokens.weight": 16})
        text = json.dumps(_config(scenario), sort_keys=True)
        if self._written.get(folder / "config.json") != text:
            (folder / "config.json").write_text(text)
            self._written[folder / "config.json"] = text
        return folder

    def adapter(self, adapter: Adapter) -> Path:
        """Return the folder of an adapter, as it is in a scenario that has it."""
        folder = self._root / adapter.folder / "adapter"
        module = "base_model.model.model.layers.0.self_attn.k_proj"
        sizes = {f"{module}.lora_A.weight": HIDDEN * RANK, f"{module}.lora_B.weight": HIDDEN * RANK}
        if self._once(folder, adapter.content, "adapter_model.safetensors", adapter.content, sizes):
            config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["k_proj"]}
            (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def _once(self, folder: Path, content: object, name: str, seed: int, sizes: dict[str, int]) -> bool:
        """Write a file of tensors unless it holds these bytes already; return whether it was written."""
        if self._written.get(folder) == content:
            return False
        # Both come with every engine; neither is needed to start this package.
        import numpy
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        made = numpy.random.default_rng(seed)
        tensors = {tensor: made.standard_normal((RANK, size // RANK), numpy.float32) for tensor, size in sizes.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        self._written[folder] = content
        return True
