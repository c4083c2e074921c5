"""The bundled tiny model in variants, each of which differs in one dimension."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType

from tests.support.engine import Adapter

BUNDLED = Path(__file__).parents[2] / "models" / "tiny-reviews"
BLOCK = 32


def loadable(prompt_tokens: int) -> int:
    """Return how many tokens ExampleConnector can load for a prompt of `prompt_tokens`.

    From the connector's code: the last token is always computed, and of the rest whole blocks are looked up.
    """
    return max((prompt_tokens - 2) // BLOCK * BLOCK, 0)


class Models:
    """Variants of the bundled model, made once in a folder.

    Args:
        folder: Where to make them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def base(self) -> str:
        return str(BUNDLED / "base")

    def copy_base(self, target: Path) -> str:
        shutil.copytree(BUNDLED / "base", target)
        return str(target)

    def perturb(self, checkpoint: Path, seed: int = 1) -> None:
        """Exchange the weights in `checkpoint` for others, at the same path."""
        import torch
        from safetensors.torch import load_file, save_file

        file = checkpoint / "model.safetensors"
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: (t + 0.2 * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
            for name, t in load_file(file).items()
        }
        save_file(tensors, checkpoint / "new", metadata={"format": "pt"})
        (checkpoint / "new").replace(file)

    def adapter(self, policy: str, number: int = 1, name: str | None = None, folder: Path | None = None) -> Adapter:
        """Return an adapter, in the place where it is bundled or as a copy in `folder`."""
        path = BUNDLED / "adapters" / policy
        if folder is not None:
            shutil.copytree(path, folder)
            path = folder
        return Adapter(name or policy, number, str(path))

    @cached_property
    def _reviews(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("tiny_reviews", BUNDLED / "reviews.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    def prompts(self, count: int = 16) -> list[list[int]]:
        """Return the tokens of the first evaluation reviews."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(BUNDLED / "base" / "tokenizer.json"))
        return [tokenizer.encode(self._reviews.prompt(r)).ids for r in self._reviews.evaluation_reviews()[:count]]

    def random_prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Return a prompt of exactly `tokens` tokens."""
        source = random.Random(seed)
        return [source.randrange(10, 700) for _ in range(tokens)]
