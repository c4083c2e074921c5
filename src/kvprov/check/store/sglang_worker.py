"""One worker of SGLang's: `python -m kvprov.check.store.sglang_worker REQUEST.json`. It serves the documents, and ends.

It knows documents, a store and what the engine is to be told, and nothing of what is to be shown. SGLang starts its
scheduler in a process that imports this module again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from kvprov.check.store.settle import settle

PAGE_TOKENS: Final = 16
DEVICE_TOKENS: Final = 8192
"""Tokens that the engine keeps on its device; it keeps twice as many on the host."""

FOLDER_VARIABLE: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""Names the folder of the file backend. Some releases know no other way to say it."""

INNER: Final = "file"


def run(request: dict[str, Any]) -> None:
    """Serve the documents of `request` on a fresh engine, and wait until the store is as it will be."""
    os.environ[FOLDER_VARIABLE] = request["store"]
    from sglang import Engine

    engine = Engine(**arguments(request))
    adapter = {} if request["adapter"] is None else {"lora_path": request["adapter"]["name"]}
    for document in request["documents"]:
        # One at a time: a batch of another shape would round in another way.
        engine.generate(
            input_ids=document,
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            cache_salt=request["salt"],
            **adapter,
        )
    page = engine.server_args.page_size
    settle(Path(request["store"]), at_least=sum(len(document) // page for document in request["documents"]))


def arguments(request: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's `ServerArgs` for a request. What the store hangs on comes last, so that nothing replaces it."""
    adapter = request["adapter"]
    told = {
        "model_path": request["model"],
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "random_seed": 0,
        "log_level": "info",
        "page_size": PAGE_TOKENS,
        "max_total_tokens": DEVICE_TOKENS,
        **({} if adapter is None else {"enable_lora": True, "lora_paths": [f"{adapter['name']}={adapter['folder']}"]}),
        **request["arguments"],
    }
    return told | {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2,
        # Every page is written at once, and not when it is met again.
        "hicache_write_policy": "write_through",
        **_storage(request["bound"]),
    }


def _storage(bound: bool) -> dict[str, Any]:
    if not bound:
        return {"hicache_storage_backend": INNER}
    from kvprov.engines.sglang import guard

    # So that SGLang does not start where kvprov's plugin is not in effect, rather than run unbound.
    named = {
        "backend_name": "kvprov",
        "module_path": guard.MODULE,
        "class_name": guard.CLASS,
        guard.INNER: INNER,
    }
    return {"hicache_storage_backend": guard.BACKEND, "hicache_storage_backend_extra_config": json.dumps(named)}


def main() -> None:
    """Run one worker."""
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine's own end takes seconds, and what it wrote is there. Its processes end with this one.
    os._exit(0)


if __name__ == "__main__":
    main()
