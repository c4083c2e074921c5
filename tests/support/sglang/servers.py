"""SGLang's HTTP server in processes of its own, started as in production."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import servers
from tests.support.ports import free_port
from tests.support.sglang.engine import Answer, Launch, answer
from tests.support.sglang.plugins import install_plugins
from tests.support.sglang.processes import end_group, environment


class Server(servers.Server):
    """A server that is up. `complete` asks it with the stock client of OpenAI's API."""

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
        """Post JSON and return the answer: decoded, where it is JSON.

        Raises:
            urllib.error.HTTPError: The server refused.
        """
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def generate(self, prompt: Sequence[int], *, tokens: int = 8, **body: Any) -> Answer:
        """Complete `prompt` greedily with SGLang's own API: `lora_path`, `cache_salt`, `extra_key` go into `body`."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        wanted = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, **body}
        return answer(self.post("/generate", wanted))

    def flush(self, timeout: float = 20) -> None:
        """Forget what the device and the host hold, once the server agrees: it refuses while pages are written."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.post("/flush_cache")
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return


@contextmanager
def serve(folder: Path, launch: Launch, *, served: str = "base") -> Iterator[Server]:
    """Run a server until the block ends.

    Args:
        folder: For its log and the plugins of these tests.
        launch: How to start it.
        served: The name under which it serves the model.
    """
    port, log = free_port(), folder / f"server-{time.time_ns()}.log"
    plugins = install_plugins(folder / f"plugins-{port}")
    launch = replace(launch, args={"skip_tokenizer_init": False, **launch.args})
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", served),
        *_options(launch.arguments()),
    ]
    path = os.pathsep.join(filter(None, (*launch.path, plugins, os.environ.get("PYTHONPATH"))))
    settings = {**os.environ, **environment(), **launch.environment(), "PYTHONPATH": path}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=settings, stdout=out, stderr=out, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        servers.wait_until_up(server, process)
        yield server
    finally:
        # Its own end waits for more than 10 s, and says nothing.
        end_group(process.pid)
        process.wait()


def _options(arguments: dict[str, Any]) -> Iterator[str]:
    """Return `ServerArgs` as options of the command."""
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            yield option
        elif isinstance(value, list):
            yield from (option, *value) if value else ()
        elif value is not False and value is not None:
            yield from (option, str(value))
