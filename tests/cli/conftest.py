from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvprov.identity.files


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of whoever runs the tests, no cache of theirs, and no waiting for files to be two seconds old."""
    for name in os.environ:
        if name.startswith("KVPROV_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("KVPROV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(kvprov.identity.files, "SETTLE_NS", 40_000_000)
