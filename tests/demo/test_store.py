"""Entries are attributed to who wrote them, and reads to the entries that were opened."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

from kvprov.demo.store import Store
from kvprov.demo.watch import StoreWatch


def write_entry(store: Path, name: str, tokens: int) -> None:
    header = json.dumps({"kv_cache": {"dtype": "BF16", "shape": [tokens, 2, 1], "data_offsets": [0, tokens * 4]}})
    (store / name).mkdir()
    for layer in ("model.layers.0", "model.layers.1"):
        content = struct.pack("<Q", len(header)) + header.encode() + bytes(tokens * 4)
        (store / name / f"{layer}.safetensors").write_bytes(content)


def test_entries_belong_to_who_wrote_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_entry(tmp_path, "one", 128)
    write_entry(tmp_path, "two", 96)
    assert store.note_written("A") == 2
    write_entry(tmp_path, "three", 64)
    assert store.note_written("B") == 1
    assert store.note_written("B") == 0
    assert store.tokens_by_writer() == {"A": 224, "B": 64}
    assert store.tokens_by_writer({"two", "three"}) == {"A": 96, "B": 64}
    assert store.tokens_by_writer(set()) == {}


def test_watch_sees_what_another_process_opens(tmp_path: Path) -> None:
    for name in ("read", "looked-at", "untouched"):
        write_entry(tmp_path, name, 32)
    program = (
        "import pathlib, sys; store = pathlib.Path(sys.argv[1]); "
        "[path.read_bytes() for path in (store / 'read').iterdir()]; "
        # A lookup: neither a stat nor a listing is a read.
        "assert (store / 'looked-at').exists() and list((store / 'looked-at').iterdir())"
    )
    with StoreWatch(tmp_path, ["read", "looked-at", "untouched"]) as watch:
        assert watch.opened() == set()
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
        assert watch.opened() == {"read"}
        assert watch.opened() == set()


def test_watch_of_an_empty_store(tmp_path: Path) -> None:
    with StoreWatch(tmp_path, []) as watch:
        assert watch.opened() == set()
