"""What `kvprov doctor` learns from a real vLLM that lacks what kvprov needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

BREAK = """
import vllm.v1.core.kv_cache_utils as utils
import vllm.v1.engine.core as core

utils.generate_block_hash_extra_keys = lambda request, other: None
del core.EngineCore.add_lora

from kvprov.engines.vllm.inspect import main

main()
"""


def test_each_seam_that_is_missing_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", BREAK], capture_output=True, text=True, check=True)
    seams = {seam["name"]: seam for seam in json.loads(done.stdout)["seams"]}
    broken = {name for name, seam in seams.items() if seam["error"]}
    assert broken == {"generate_block_hash_extra_keys", "EngineCore.add_lora"}
    assert all(seams[name]["advice"] for name in broken)
