"""The bound connectors, under the names of vLLM's own.

Installing kvprov is enough for vLLM to use these in place of its own. Whoever wants an engine that refuses to start
where kvprov is missing or filtered out names this module: `--kv-transfer-config
'{"kv_connector": "ExampleConnector", "kv_connector_module_path": "kvprov.engines.vllm.connector", ...}'`.
"""

from typing import Any

from kvprov.engines.vllm import connectors


def __getattr__(name: str) -> Any:
    # Each is imported when it is asked for: some need packages that are not installed everywhere.
    if name in connectors.bound_names():
        return connectors.bound_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
