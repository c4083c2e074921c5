"""One worker of vLLM's: `python -m kvprov.check.store.vllm_worker REQUEST.json`. It serves the documents, and ends.

It knows documents, a store and what the engine is to be told, and nothing of what is to be shown.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from kvprov.check.store.settle import settle

BLOCK_TOKENS: Final = 32
NEW_TOKENS: Final = 8
"""Enough steps after the prompt for a tier that stores a block in the step after it is full."""


def run(request: dict[str, Any]) -> None:
    """Serve the documents of `request` on a fresh engine, and wait until the store is as it will be."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = request["adapter"]
    arguments = {
        "model": request["model"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "seed": 0,
        "max_model_len": request["max_model_len"],
        "max_num_seqs": 8,
        "block_size": BLOCK_TOKENS,
        **({} if adapter is None else {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter["rank"]}),
        **request["arguments"],
        # Without the engine's own prefix cache, every token is computed.
        "enable_prefix_caching": False,
        "kv_transfer_config": request["connector"],
    }
    engine = LLM(**arguments)
    salt = {} if request["salt"] is None else {"cache_salt": request["salt"]}
    for document in request["documents"]:
        # One at a time: a batch of another shape would round in another way.
        engine.generate(
            {"prompt_token_ids": document, **salt},
            SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True),
            lora_request=None if adapter is None else LoRARequest(adapter["name"], 1, adapter["folder"]),
            use_tqdm=False,
        )
    settle(Path(request["store"]))


def main() -> None:
    """Run one worker."""
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine's own end takes seconds, and what it wrote is there.
    os._exit(0)


if __name__ == "__main__":
    main()
