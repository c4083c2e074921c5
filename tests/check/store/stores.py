"""Stores made up for tests, in each format as its connector names and lays out entries."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

HASH = hashlib.sha256(b"a prompt").hexdigest()


def name(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def bf16(values: np.ndarray) -> bytes:
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def put(root: Path, path: str, data: bytes) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def example(root: Path, number: int, values: np.ndarray) -> str:
    path = f"{name(number)[:32]}/model.layers.0.self_attn.attn.safetensors"
    put(root, path, safetensors({"kv_cache": ("BF16", list(values.shape), bf16(values))}))
    return path


def vllm_fs(root: Path, number: int, values: np.ndarray) -> str:
    base = "kvprov-tp1-pp1-pcp1-dcp1_0123456789ab"
    put(root, f"{base}/config.json", json.dumps({"dtype": "bfloat16", "model_name": "kvprov"}).encode())
    path = f"{base}_r0/{name(number)[:3]}/{name(number)[3:5]}_g0/{name(number)}.bin"
    put(root, path, bf16(values))
    return path


def lmcache_mp(root: Path, number: int, values: np.ndarray) -> str:
    path = f"-SEP-models-SEP-tiny@0x01000100@0@{name(number)}@tenant-1.data"
    put(root, path, bf16(values))
    return path


def lmcache_fs(root: Path, number: int, values: np.ndarray) -> str:
    path = f"-SEP-models-SEP-tiny@1@0@{name(number)[:16]}@bfloat16@kvprov%{'A' * 43}.data"
    data = bf16(values)
    put(root, path, struct.pack("<7i", len(data), 1, 3, values.size, 0, 0, 0) + data)
    return path


def lmcache_disk(root: Path, number: int, values: np.ndarray) -> str:
    path = f"-models-tiny@1@0@{name(number)[:16]}@bfloat16.pt"
    put(root, path, bf16(values))
    return path


def sglang(root: Path, number: int, values: np.ndarray) -> str:
    path = f"{name(number)}_-models-tiny_0_1.bin"
    put(root, path, bf16(values))
    return path


Writer = Callable[[Path, int, np.ndarray], str]
WRITERS: dict[str, Writer] = {
    "example": example,
    "vllm-fs": vllm_fs,
    "lmcache-mp": lmcache_mp,
    "lmcache-fs": lmcache_fs,
    "lmcache-disk": lmcache_disk,
    "sglang-file": sglang,
}
NAMES_NO_TYPE = {"lmcache-mp", "sglang-file"}
