"""A trainer that sends weights to an engine over a process group."""

from __future__ import annotations

import multiprocessing
from types import TracebackType


def _send(path: str, port: int, group: str) -> None:
    import torch
    from safetensors.torch import load_file
    from sglang.srt.utils.common import init_custom_process_group

    members = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=group
    )
    for tensor in load_file(f"{path}/model.safetensors").values():
        torch.distributed.broadcast(tensor, src=0, group=members)


class Trainer:
    """The other member of the group, in a process of its own, while the block lasts."""

    def __init__(self, path: str, port: int, group: str) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=_send, args=(path, port, group))

    def __enter__(self) -> Trainer:
        self._process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()
        self._process.join(60)
        if error is None and self._process.exitcode:
            raise RuntimeError(f"the trainer ended with {self._process.exitcode}")
