"""Drivers for vLLM's connectors, those of LMCache and Mooncake among them. Importing this imports no engine."""
