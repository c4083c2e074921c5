"""Which peers a request may name."""

from __future__ import annotations

from typing import Any

import pytest

from kvprov.engines.vllm import peers

LISTED = ("10.0.0.1:7000", "[::1]:7001")


def source(host: Any, port: Any) -> dict[str, Any]:
    return {"remote_host": host, "remote_port": port, "kv_request_id": "r"}


@pytest.mark.parametrize("name", peers.SOURCES)
def test_listed_peers_stay(name: str) -> None:
    for parameters in ({name: source("10.0.0.1", 7000)}, {name: source("[::1]", "7001"), "max_load_tokens": 5}):
        assert peers.allowed(parameters, LISTED) == (parameters, [])


@pytest.mark.parametrize("name", peers.SOURCES)
@pytest.mark.parametrize(
    "stranger",
    [
        source("10.0.0.2", 7000),
        source("10.0.0.1", 7001),
        source("10.0.0.1.", 7000),
        source(["10.0.0.1"], 7000),
        source(None, None),
        {"kv_request_id": "r"},
        "10.0.0.1:7000:",
        ["10.0.0.1:7000"],
        7,
    ],
    ids=str,
)
def test_others_are_dropped_whatever_they_are(name: str, stranger: Any) -> None:
    kept, named = peers.allowed({name: stranger, "max_load_tokens": 5}, LISTED)
    assert kept == {"max_load_tokens": 5}
    assert len(named) == 1


def test_one_stranger_drops_both_sources() -> None:
    both = dict(zip(peers.SOURCES, (source("10.0.0.1", 7000), source("evil", 1)), strict=True))
    assert peers.allowed(both, LISTED) == ({}, ["evil:1"])


@pytest.mark.parametrize("parameters", [None, "text", 5, [], {}, {"remote_decoder": {"kv_request_id": "r"}}], ids=str)
def test_whatever_names_no_source_is_left_alone(parameters: Any) -> None:
    assert peers.allowed(parameters, ()) == (parameters, [])


def test_what_is_logged_of_a_stranger_fits_one_line(caplog: pytest.LogCaptureFixture) -> None:
    peers.Strangers().note(["a\nWARNING forged:" + "x" * 500])
    (line,) = (record.getMessage() for record in caplog.records)
    assert "\n" not in line
    assert len(line) < 200
