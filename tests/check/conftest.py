from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvprov.identity.files
from kvprov.check import Checker
from tests.check.support import ADAPTERS, BASE


@pytest.fixture(autouse=True)
def _short_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvprov.identity.files, "SETTLE_NS", 40_000_000)


@pytest.fixture(scope="session")
def checker() -> Iterator[Checker]:
    """The bundled model with both of its adapters. Its state is computed once for all key functions."""
    with Checker(BASE, adapters=ADAPTERS) as made:
        yield made


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder for an adapter that a test writes."""
    return tmp_path / "adapter"
