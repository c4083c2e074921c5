"""Imported once by the fork server, so that each engine process starts with vLLM in memory."""

import gc

import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

__all__ = ["LLM", "LoRARequest", "SamplingParams", "vllm"]

# All of it lives as long as the server. Else each collection in each engine walks it, and copies its pages.
gc.freeze()
