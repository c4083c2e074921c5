"""LoRA adapters: read, generated, and varied in one place at a time. Tensors are torch's, which is imported late."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvprov.check.errors import CheckError
from kvprov.check.verdicts import Fault
from kvprov.identity.adapter import CONFIG_FILE, TENSORS_FILE
from kvprov.identity.adapter_config import effective_config
from kvprov.identity.checkpoint import select_files
from kvprov.identity.files import open_file
from kvprov.identity.safetensors import read_header
from kvprov.identity.strict_json import parse_object

RANK: Final = 8
MTIME_NS: Final = 1_700_000_000_000_000_000
"""When files that the check writes claim to have changed: all at one time, so that no key can tell them by that."""

_PREFIX: Final = "base_model.model."
_TARGETS: Final = re.compile(r"(.*\.(k_proj|v_proj|qkv_proj|query_key_value|kv_b_proj))\.weight")
_PLAIN_FIELDS: Final = frozenset(
    {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "peft_type", "target_modules"}
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        config: `adapter_config.json`.
        tensors: By name, as the file has them.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Any]


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        UnreadableContentError: A file cannot be read or is broken.
    """
    from safetensors.torch import load

    with open_file(folder / CONFIG_FILE) as file:
        config = parse_object(file.read_all(8 << 20), file.path)
    with open_file(folder / TENSORS_FILE) as file:
        read_header(file)
        return Adapter(config, load(file.read_all(file.stamp.size)))


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter over whatever adapter `folder` holds, with times that say nothing."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    files = {CONFIG_FILE: json.dumps(dict(adapter.config)).encode(), TENSORS_FILE: save(dict(adapter.tensors))}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        os.utime(folder / name, ns=(MTIME_NS, MTIME_NS))


def targets(model: Path) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a checkpoint that make keys and values: outputs and inputs by the layer's name.

    Known by the names that most models give them. Only headers are read.
    """
    found = {}
    for path in select_files(model):
        with open_file(path) as file:
            for span in read_header(file):
                match = _TARGETS.fullmatch(span.name)
                if match is not None and len(span.shape) == 2:
                    found[match[1]] = (span.shape[0], span.shape[1])
    return found


def generate(modules: Mapping[str, tuple[int, int]], seed: int, rank: int = RANK) -> Adapter:
    """Return an adapter of random tensors for some linear layers, the same for one seed.

    Args:
        modules: Outputs and inputs of each layer by its name.
        seed: Of the random numbers.
        rank: Of each layer's update.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in sorted(modules.items()):
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
    }
    return Adapter(config, tensors)


@dataclass(frozen=True, slots=True)
class Variant:
    """An adapter that differs from another in one place.

    Attributes:
        what: The place, in words.
        fault: What a key function does wrong that does not see it.
        adapter: The adapter.
    """

    what: str
    fault: Fault
    adapter: Adapter


def variants(adapter: Adapter) -> Iterator[Variant]:
    """Yield adapters that differ from `adapter` in one tensor each, in which tensor is which, and in one field."""
    import torch

    names = sorted(adapter.tensors)
    for name in names:
        tensor = adapter.tensors[name]
        # Zero, as a tensor may be before training, is its own negative.
        other = -tensor if bool(torch.any(tensor != 0)) else torch.full_like(tensor, 0.02)
        yield Variant(f"the tensor {name}", Fault.TENSOR, Adapter(adapter.config, {**adapter.tensors, name: other}))
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            x, y = adapter.tensors[a], adapter.tensors[b]
            if x.shape == y.shape and x.dtype == y.dtype and not torch.equal(x, y):
                exchanged = {**adapter.tensors, a: y, b: x}
                yield Variant(f"{a} and {b} exchanged", Fault.TENSOR_NAMES, Adapter(adapter.config, exchanged))
                break
        else:
            continue
        break
    alpha = adapter.config.get("lora_alpha") or 8
    twice = {**adapter.config, "lora_alpha": 2 * alpha}
    yield Variant("lora_alpha doubled", Fault.ADAPTER_CONFIG, Adapter(twice, adapter.tensors))


def _matching(patterns: Any, module: str, default: Any) -> Any:
    # As PEFT matches them: the first that equals the module's name or the end of it.
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def updates(adapter: Adapter, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield what an adapter adds to each linear layer's weight: the layer's name and a float32 tensor.

    Source: LoRA as PEFT 0.21 merges it: `B @ A`, times `lora_alpha / r`, or `lora_alpha / sqrt(r)` with rsLoRA.

    Args:
        adapter: The adapter.
        folder: Where it is from, for errors.

    Raises:
        CheckError: It is no plain LoRA adapter.
    """
    config = adapter.config
    unknown = sorted(effective_config(config).keys() - _PLAIN_FIELDS)
    if str(config.get("peft_type", "LORA")).upper() != "LORA" or unknown:
        raise CheckError(
            f"The adapter {folder} is no plain LoRA" + (f": it sets {', '.join(unknown)}." if unknown else "."),
            "Compare a plain LoRA adapter instead: the check merges nothing else.",
        )
    left = set(adapter.tensors)
    for name in sorted(adapter.tensors):
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_A(?:\.default)?\.weight", name)
        if match is None:
            continue
        other = name.replace(".lora_A", ".lora_B")
        if other not in left:
            raise CheckError(f"The adapter {folder} has {name} without {other}.", "Save the adapter again.")
        left -= {name, other}
        a, b = adapter.tensors[name].float(), adapter.tensors[other].float()
        rank = _matching(config.get("rank_pattern"), match[1], config.get("r", 8))
        alpha = _matching(config.get("alpha_pattern"), match[1], config.get("lora_alpha", 8))
        if a.shape[0] != rank or b.shape[1] != rank:
            raise CheckError(f"The adapter {folder}: {name} has not the rank {rank}.", "Save the adapter again.")
        update = b @ a * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
        yield match[1], update.T if config.get("fan_in_fan_out") else update
    if left:
        raise CheckError(
            f"The adapter {folder} has tensors that are no LoRA matrices, such as {min(left)[:80]!r}.",
            "Compare a plain LoRA adapter instead: the check merges nothing else.",
        )
