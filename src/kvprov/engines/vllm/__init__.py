"""vLLM: where its facts come from (`facts`, `weights`, `adapters`) and where digests enter its keys (the rest)."""
