"""The bundled tiny model, made ready for prompts of thousands of tokens."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tests.support.engine import Adapter
from tests.support.models import BUNDLED, Models
from tests.support.sglang.engine import PAGE

POSITIONS = 4096
LENGTH = 2100


def loadable(prompt_tokens: int, page: int = PAGE) -> int:
    """Return how many tokens a store can give for a prompt of `prompt_tokens`: whole pages, without the last token."""
    return (prompt_tokens - 1) // page * page


class LongModels(Models):
    """Variants of the bundled model that take prompts of up to 4,096 tokens."""

    @cached_property
    def base(self) -> str:
        return self.copy_base(self.folder / "base")

    def copy_base(self, target: Path) -> str:
        super().copy_base(target)
        file = target / "config.json"
        # The weights are the same: positions are rotations, computed from this number on.
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": POSITIONS}, indent=2))
        return str(target)

    def adapter(self, policy: str, number: int = 1, name: str | None = None, folder: Path | None = None) -> Adapter:
        """Return an adapter in `folder` that does what the bundled one does, and that SGLang can load.

        SGLang joins the projections of an attention layer, and takes for granted that an adapter has a part for
        `q_proj` (`normalize_qkv_proj`). The bundled ones have none, so here it is added: zeros, which change nothing.
        """
        from safetensors.torch import load_file, save_file

        target = folder or self.folder / "adapters" / policy
        if not (target / "adapter_model.safetensors").exists():
            source = BUNDLED / "adapters" / policy
            tensors = load_file(source / "adapter_model.safetensors")
            tensors |= {name.replace("v_proj", "q_proj"): 0 * tensor for name, tensor in tensors.items()}
            config = json.loads((source / "adapter_config.json").read_text())
            target.mkdir(parents=True, exist_ok=True)
            save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
            config["target_modules"] = ["q_proj", "v_proj"]
            (target / "adapter_config.json").write_text(json.dumps(config, indent=2))
        return Adapter(name or policy, number, str(target))

    def long_prompts(self, count: int = 1) -> list[list[int]]:
        """Return prompts of 2,100 random tokens: in these, other weights and adapters give other tokens."""
        return [self.random_prompt(LENGTH, seed) for seed in range(5, 5 + count)]
