"""The bound connectors, under the names of vLLM's own.

Installing kvprov is enough for vLLM to use these in place of its own. Whoever wants an engine that refuses to start
where kvprov is missing or filtered out names this module: `--kv-transfer-config
'{"kv_connector": "ExampleConnector", "kv_connector_module_path": "kvprov.engines.vllm.connector", ...}'`.
"""

from kvprov.engines.vllm.example import BoundExampleConnector as ExampleConnector

__all__ = ["ExampleConnector"]
