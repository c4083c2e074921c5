"""A checkpoint like another one, with other numbers in it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, Final

from kvprov.check.bench import link_files
from kvprov.check.packages import release_memory
from kvprov.identity.checkpoint import select_files

NOISE: Final = 0.05
"""Standard deviation of what is added to a tensor, as a part of its own."""


def perturb(folder: Path, at: Path, seed: int) -> Path:
    """Write the checkpoint in `folder` into `at`, with noise on every floating tensor. Equal seeds give equal bytes.

    One file is in memory at a time. Files other than weights are linked to.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    link_files(folder, at)
    for path in select_files(folder):
        tensors = {}
        with safe_open(path, framework="pt") as file:
            # Its keys only: it is no mapping.
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and tensor.numel() > 1:
                    # By the name, so that the sharding does not matter.
                    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
                    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                    noise.mul_(NOISE * _deviation(tensor))
                    tensor = noise.add_(tensor).to(tensor.dtype)
                tensors[name] = tensor
        (at / path.name).unlink()
        save_file(tensors, at / path.name, metadata={"format": "pt"})
        # No key shall tell it from the original by the time of its last change.
        status = path.stat()
        os.utime(at / path.name, ns=(status.st_atime_ns, status.st_mtime_ns))
        tensors.clear()
    release_memory()
    return at


def _deviation(tensor: Any) -> float:
    deviation = float(tensor.float().std(correction=0))
    # A constant tensor, as of a norm before training, has none.
    return deviation or float(tensor.float().abs().mean()) or 1.0
