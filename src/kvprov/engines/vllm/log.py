"""The logger of everything that runs inside vLLM: below vLLM's own, so that its level and format apply."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.kvprov")
