"""The audit of the installed SGLang."""

from __future__ import annotations

import pytest

from kvprov.check.audit.run import ENGINES, run
from kvprov.check.audit.scenario import DIMENSIONS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ENGINES["sglang"].installed, reason="SGLang is not installed in this environment"),
]


def test_stock_keys_and_bound_ones() -> None:
    report = run(["sglang"])
    assert report.failures == []
    assert report.findings == []
    (engine,) = report.engines
    (row,) = engine.rows
    assert row.native is not None
    # Names of files hold the model's served name; the pages' hashes, what the client says and the adapter's handle,
    # which is made of its name and path.
    assert {name: cell.text for name, cell in row.native.items()} == {
        **dict.fromkeys(DIMENSIONS, "omitted"),
        "weights": "by name only",
        "adapter": "by name and path only",
        "sharing_domain": "bound",
        "client_namespace": "bound",
    }
    assert row.bound is not None
    assert {name: (cell.text, cell.carriers) for name, cell in row.bound.items()} == dict.fromkeys(
        DIMENSIONS, ("bound", ())
    )
    assert "HiCache storage (hf3fs)" in engine.refused
