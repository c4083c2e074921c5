"""The logger of everything that runs inside SGLang: below SGLang's own, so that its level and format apply."""

from __future__ import annotations

import logging

logger = logging.getLogger("sglang.srt.kvprov")
