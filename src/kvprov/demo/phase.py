"""One engine process of the demo: `python -m kvprov.demo.phase REQUEST.json REPLY.json`.

It knows prompts, an adapter and a store, and nothing of what the answers should be or of what is to be shown.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
HITS = "vllm:external_prefix_cache_hits"


def bytes_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and bytes of the files in an adapter's folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _engine(request: dict[str, Any]) -> Any:
    from vllm import LLM

    store: dict[str, Any] = {}
    if request["store"] is not None:
        store["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": request["store"]},
        }
    return LLM(
        model=request["model"],
        dtype="bfloat16",
        seed=0,
        max_model_len=512,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        # Without the engine's own prefix cache, every token that it did not compute came out of the store.
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        disable_log_stats=False,
        **store,
    )


def _tokens_loaded(engine: Any) -> int:
    """Return the engine's own count of tokens that came from its connector; without a connector there is none."""
    return int(sum(metric.value for metric in engine.get_metrics() if metric.name == HITS))


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Answer the prompts of `request` on a fresh engine and return what the engine says about it."""
    import vllm
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    started = time.monotonic()
    adapter = request["adapter"]
    engine = _engine(request)
    ready = time.monotonic()
    outputs = engine.generate(
        request["prompts"],
        SamplingParams(temperature=0, max_tokens=1),
        lora_request=LoRARequest(adapter["name"], adapter["id"], adapter["folder"]),
        use_tqdm=False,
    )
    return {
        "answers": [output.outputs[0].text for output in outputs],
        "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
        "cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
        "tokens_loaded": _tokens_loaded(engine),
        "adapter_sha256": bytes_digest(Path(adapter["folder"])),
        "seconds_start": ready - started,
        "seconds_answers": time.monotonic() - ready,
        "vllm": vllm.__version__,
    }


def main() -> None:
    """Run one process of the demo."""
    source, target = (Path(argument) for argument in sys.argv[1:])
    reply = run(json.loads(source.read_text(encoding="utf-8")))
    target.write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    main()
