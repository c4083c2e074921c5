from __future__ import annotations

import time

import pytest

import kvprov.identity.files

SETTLE_NS = 40_000_000
"""What tests wait instead of 2 s: ten ticks of the clock of the file systems that tests run on."""


@pytest.fixture(autouse=True)
def _short_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvprov.identity.files, "SETTLE_NS", SETTLE_NS)


def wait_until_settled() -> None:
    time.sleep(SETTLE_NS / 1e9 + 0.01)
