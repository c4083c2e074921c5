"""Two KV cache types that are stored alike: what stock reads as its own without noticing.

In the matrix, another KV type kills stock's reader. E4M3 and E5M2 are both held as bytes, so nothing notices, and the
answer is wrong: the harder case of kv_representation. vLLM's CPU build needs AVX-512 for FP8 caches.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.engine import Launch
from tests.support.models import Models, loadable
from tests.support.processes import Processes
from tests.support.provenance import ask, copied

pytestmark = pytest.mark.engine
needs_avx512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="FP8 KV caches need AVX-512 here"
)

E4M3, E5M2 = ({"kv_cache_dtype": f"fp8_{form}"} for form in ("e4m3", "e5m2"))


@needs_avx512
def test_two_forms_of_fp8(processes: Processes, models: Models, tmp_path: Path) -> None:
    prompts = models.prompts(16)
    full = sum(loadable(len(prompt)) for prompt in prompts)
    step = partial(ask, prompts=prompts, adapter=models.adapter("standard"))
    isolated = processes.run(Launch(models.base, None, "off", args=E5M2), step).results[0]
    for mode in ("off", "enforce"):
        store = tmp_path / mode
        store.mkdir()
        assert processes.run(Launch(models.base, store, mode, args=E4M3), step).results[0][1] == 0
        own = processes.run(Launch(models.base, copied(store, "own"), mode, args=E4M3), step).results[0]
        assert own[1] == full
        foreign = processes.run(Launch(models.base, store, mode, args=E5M2), step).results[0]
        if mode == "off":
            assert foreign[1] == full
            assert foreign[0] != isolated[0]
        else:
            assert foreign == isolated


@needs_avx512
def test_an_alias_is_the_same_type(processes: Processes, models: Models, store: Path) -> None:
    """`fp8` means `fp8_e4m3` in vLLM, `auto` the model's own type, and `half` is `float16`."""
    prompts = models.prompts(2)
    full = sum(loadable(len(prompt)) for prompt in prompts)
    step = partial(ask, prompts=prompts)
    for one, other in (
        (E4M3, {"kv_cache_dtype": "fp8"}),
        ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "bfloat16"}),
        ({"dtype": "half"}, {"dtype": "float16", "kv_cache_dtype": "float16"}),
    ):
        assert processes.run(Launch(models.base, store, args=one), step).results[0][1] == 0
        assert processes.run(Launch(models.base, store, args=other), step).results[0][1] == full


def test_two_block_sizes(processes: Processes, models: Models, tmp_path: Path) -> None:
    """The CPU's attention packs a whole block in an order of its own: entries of 32 tokens are rubbish to 64."""
    prompts = models.prompts(4)
    step = partial(ask, prompts=prompts, adapter=models.adapter("standard"))
    wide = {"block_size": 64}
    isolated = processes.run(Launch(models.base, None, "off", args=wide), step).results[0]
    for mode in ("off", "enforce"):
        store = tmp_path / mode
        store.mkdir()
        processes.run(Launch(models.base, store, mode), step)
        own = processes.run(Launch(models.base, copied(store, "own"), mode), step).results[0]
        assert own[1] == sum(loadable(len(prompt)) for prompt in prompts)
        foreign = processes.run(Launch(models.base, store, mode, args=wide), step).results[0]
        if mode == "off":
            assert foreign[1] > 0
            assert foreign[0] != isolated[0]
        else:
            assert foreign == isolated
