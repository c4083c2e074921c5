"""Imported once by the fork server, so that each process of an engine starts with SGLang in memory."""

import gc

import sglang.srt.entrypoints.engine
import sglang.srt.lora.lora_manager
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.managers.tokenizer_manager
import sglang.srt.model_executor.model_runner
import sglang.srt.models.llama
import torch
from sglang.srt.mem_cache.utils import get_hash_str

__all__ = ["sglang", "torch"]

# A process with threads must not fork, and one core is what each engine has.
torch.set_num_threads(1)
# Its first call loads (or compiles) a library.
get_hash_str([1], None, 1)

# All of it lives as long as the server. Else each collection in each engine walks it, and copies its pages.
gc.freeze()
