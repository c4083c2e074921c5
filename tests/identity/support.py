"""Checkpoints and adapters built by hand, without a tensor library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

Tensors: TypeAlias = Mapping[str, tuple[str, list[int], bytes]]
"""Name to dtype, shape and data."""

WEIGHTS: Tensors = {
    "model.embed.weight": ("BF16", [4, 8], bytes(range(64))),
    "model.layer.0.weight": ("F32", [2, 3], b"\x01\x02\x03\x04" * 6),
    "model.layer.1.weight": ("F8_E4M3", [16], b"\xff" * 16),
    "model.norm.bias": ("F16", [], b"\x00\x3c"),
}

LORA: Tensors = {
    "base_model.model.q_proj.lora_A.weight": ("F32", [2, 4], bytes(range(32))),
    "base_model.model.q_proj.lora_B.weight": ("F32", [4, 2], bytes(range(32, 64))),
}

LORA_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.1,
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


def with_header(header: bytes | object, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file of this header, JSON or bytes, and data; `length` is a claim of the header's length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def packed(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file of `tensors`, whose data lies in the given order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(header, data)


def write_checkpoint(folder: Path, tensors: Tensors = WEIGHTS, shards: int = 1) -> Path:
    """Write a checkpoint of so many files, with an index when there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(packed(tensors))
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[i::shards]}
        (folder / name).write_bytes(packed(part))
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_adapter(folder: Path, tensors: Tensors = LORA, config: object = LORA_CONFIG) -> Path:
    """Write a PEFT adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(packed(tensors))
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "adapter_config.json").write_bytes(raw)
    return folder


def flipped(tensors: Tensors, name: str, bit: int = 0) -> Tensors:
    """Return `tensors` with one bit of one tensor's data flipped."""
    dtype, shape, raw = tensors[name]
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return {**tensors, name: (dtype, shape, bytes(changed))}


def open_descriptors() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def replace_file(path: Path, data: bytes) -> None:
    """Put a new file in the place of an old one, as publishers should."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def overwrite(path: Path, data: bytes) -> None:
    """Write into the file itself, as publishers should not."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))
