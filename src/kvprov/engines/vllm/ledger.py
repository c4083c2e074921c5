"""What a vLLM engine says of itself in the ledger, and what it calls the values of a request."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import kvprov
from kvprov.contract.dimensions import ADAPTER
from kvprov.engines.vllm.log import logger
from kvprov.ledger.writer import Recorder, open_recorder
from kvprov.settings import Settings


def recorder(settings: Settings, vllm_config: Any) -> Recorder:
    """Return what records the engine's digests, by the setting `KVPROV_LEDGER`."""
    import vllm

    transfer = vllm_config.kv_transfer_config
    facts = {
        "engine": f"vLLM {vllm.__version__}",
        "kvprov": kvprov.__version__,
        "connector": "none" if transfer is None else str(transfer.kv_connector),
        "model": str(vllm_config.model_config.model),
        "host": socket.gethostname(),
    }
    return open_recorder(settings.ledger, facts, logger)


def names_of(request: Any) -> Mapping[str, str]:
    """Return what the engine calls the values of a request, by dimension. Its salt is none of them."""
    return {} if request.lora_request is None else {ADAPTER.name: str(request.lora_request.lora_name)}
