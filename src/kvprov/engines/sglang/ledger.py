"""What an SGLang scheduler says of itself in the ledger."""

from __future__ import annotations

import socket
from typing import Any

import kvprov
from kvprov.engines.sglang.log import logger
from kvprov.ledger.writer import Recorder, open_recorder
from kvprov.settings import Settings


def recorder(settings: Settings, server_args: Any, path: str) -> Recorder:
    """Return what records the scheduler's digests, by the setting `KVPROV_LEDGER`.

    Args:
        settings: The process's settings.
        server_args: SGLang's `ServerArgs`.
        path: The path by which the scheduler shares state.
    """
    import sglang

    facts = {
        "engine": f"SGLang {sglang.__version__}",
        "kvprov": kvprov.__version__,
        "connector": path,
        "model": str(server_args.model_path),
        "host": socket.gethostname(),
    }
    return open_recorder(settings.ledger, facts, logger)
