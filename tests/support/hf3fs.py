"""vLLM's HF3FSKVConnector on a CPU and on plain files: its mock client, and its own metadata server.

vLLM runs it on GPUs alone, for streams and events, and for a kernel that copies blocks; here everything happens at
once, and tensors are copied. It asks for the metadata server at one fixed port, whatever its configuration says; here
each test has a server of its own.

As a program, this is that server: vLLM's, with one more route that lists its keys.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.hf3fs"
FILE_SIZE = 32 << 20


class _Nothing:
    """A CUDA stream or event where everything has happened already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


def _copy(connector: Any, block_ids: list[int], buffers: list[Any], operation: str) -> None:
    for buffer, block in zip(buffers, block_ids, strict=True):
        for layer, cache in enumerate(connector._kv_caches.values()):
            target, source = (buffer[layer], cache[block]) if operation == "gather" else (cache[block], buffer[layer])
            target.copy_(source)


def install(url: str) -> None:
    """Let the connector work in this process, with the metadata server at `url`."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs import hf3fs_connector

    torch.accelerator.set_device_index = lambda *_args: None  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _Nothing  # type: ignore[assignment]
    torch.cuda.stream = lambda *_args: contextlib.nullcontext()  # type: ignore[assignment]
    hf3fs_connector.Hf3fsMetadataClient = partial(hf3fs_connector.Hf3fsMetadataClient, url)
    hf3fs_connector.HF3FSKVConnector._gather_or_scatter_kv_caches = _copy


@dataclass(frozen=True)
class MetadataServer:
    """A metadata server that is up."""

    url: str

    def keys(self) -> list[str]:
        """Return the keys of all entries that are complete."""
        with urllib.request.urlopen(f"{self.url}/keys", timeout=10) as answer:
            keys: list[str] = json.load(answer)
        return keys

    def wait_for(self, entries: int, timeout: float = 20) -> list[str]:
        """Return the keys once there are as many as `entries`, or when the time is over."""
        deadline = time.monotonic() + timeout
        while len(keys := self.keys()) < entries and time.monotonic() < deadline:
            time.sleep(0.05)
        return keys


def hf3fs(folder: Path) -> dict[str, Any]:
    """Return the members of the KV transfer configuration for a store in `folder`."""
    return {
        "kv_connector": "HF3FSKVConnector",
        "kv_connector_extra_config": {
            "hf3fs_storage_path": str(folder),
            "hf3fs_file_size": FILE_SIZE,
            "hf3fs_client_numjobs": 2,
        },
    }


@contextmanager
def metadata_server(folder: Path) -> Iterator[MetadataServer]:
    """Run a metadata server, with its log in `folder`, until the block ends."""
    from tests.support.ports import free_port

    port = free_port()
    with (folder / "metadata-server.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, __file__, str(port)], stdout=log, stderr=log)
    server = MetadataServer(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                server.keys()
                break
            except (OSError, urllib.error.URLError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait(10)


def _server_module() -> ModuleType:
    # By its file: importing the package would bring all of vLLM.
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations
    path = Path(vllm.submodule_search_locations[0], *PACKAGE.split(".")[1:], "hf3fs_metadata_server.py")
    spec = importlib.util.spec_from_file_location("hf3fs_metadata_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(port: int) -> None:
    """Serve."""
    server = _server_module().Hf3fsMetadataServer()

    def keys() -> list[str]:
        with server.state.global_lock:
            return sorted(key for key, entry in server.state.key_metadata.items() if entry.is_complete())

    server.app.get("/keys")(keys)
    server.run("127.0.0.1", port)


if __name__ == "__main__":
    main(int(sys.argv[1]))
