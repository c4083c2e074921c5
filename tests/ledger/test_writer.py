"""What workers write: once, verified, bounded, off the request path, and never to the harm of a request."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvprov.contract import Digester, Known, Registry
from kvprov.contract.document import evaluate, parse_document
from kvprov.contract.key import key_text
from kvprov.identity.canonical import config_identity
from kvprov.ledger import Forged, Ledger, Record
from kvprov.ledger.admission import Limits
from kvprov.ledger.writer import SilentRecorder, open_recorder
from tests.ledger.support import FACTS, SECRET, digester, files, note, request, worker, writer


def record(ledger: Ledger, text: str) -> Record:
    found = ledger.find(text)
    assert isinstance(found, Record), found
    return found


def test_a_digest_is_recorded_once_with_its_worker_and_its_configurations(tmp_path: Path) -> None:
    ledger, of = writer(tmp_path), digester()
    texts = [note(ledger, of, request("standard"), {"adapter": "standard"}) for _ in range(3)]
    assert ledger.flush(5)
    kinds = [name.split("/")[0] for name in files(tmp_path)]
    assert [kinds.count(kind) for kind in ("digests", "workers", "configs")] == [1, 1, 3]
    assert ledger.counts.written == 1
    found = record(Ledger(str(tmp_path)), texts[0])
    assert found.descriptor.request == request("standard")
    assert found.descriptor.worker == worker()
    assert (found.facts, found.names) == (FACTS, {"adapter": "standard"})
    assert record(Ledger(str(tmp_path)), key_text(of.worker_digest)).worker_only


def test_a_record_is_a_document_of_the_specification(tmp_path: Path) -> None:
    ledger = writer(tmp_path)
    text = note(ledger, digester(), request("standard", "tenant-1"))
    assert ledger.flush(5)
    (file,) = (tmp_path / "digests").iterdir()
    assert evaluate(*parse_document(file.read_bytes())).text == text


def test_no_salt_and_no_secret_is_written(tmp_path: Path) -> None:
    ledger = writer(tmp_path)
    note(ledger, digester(), request("standard", "a-tenant's-salt"))
    assert ledger.flush(5)
    written = b"".join((tmp_path / name).read_bytes() for name in files(tmp_path))
    assert b"hmac-sha256.2026-1:" in written
    assert b"a-tenant" not in written
    assert SECRET.key not in written


def test_both_forms_of_the_text_are_found(tmp_path: Path) -> None:
    ledger, of = writer(tmp_path), digester()
    short = note(ledger, of, request("a"), bits=128)
    long = note(ledger, of, request("b"))
    assert ledger.flush(5)
    reader = Ledger(str(tmp_path))
    assert record(reader, short).text.startswith(short[:21])
    assert record(reader, long).text == long
    assert record(reader, key_text(of.digest(request("b")), 128)).text == long  # type: ignore[arg-type]


def test_numbers_that_are_used_once_are_not_recorded(tmp_path: Path) -> None:
    ledger = writer(tmp_path)
    note(ledger, digester(), {**request(), "adapter": Known("nonce:" + "0" * 32)})
    note(ledger, digester(weights=Known("nonce:" + "1" * 32)), request())
    ledger.note_worker(digester(weights=Known("nonce:" + "2" * 32)))
    assert ledger.flush(5)
    assert files(tmp_path) == []
    note(ledger, digester(), request())
    assert ledger.flush(5)
    assert len(files(tmp_path)) == 5


def test_a_draft_model_s_configuration_is_recorded_with_the_one_that_names_it(tmp_path: Path) -> None:
    draft = config_identity({"config": {"layers": 1}, "resolved": {}})
    model = config_identity({"config": {}, "resolved": {"draft_config": draft}})
    ledger = writer(tmp_path)
    ledger.note_worker(digester(model_config=Known(model)))
    assert ledger.flush(5)
    assert Ledger(str(tmp_path)).config(draft) == {"config": {"layers": 1}, "resolved": {}}


def test_the_first_writer_s_sound_record_stays_and_a_broken_one_is_replaced(tmp_path: Path) -> None:
    first, second, third = writer(tmp_path), writer(tmp_path), writer(tmp_path)
    text = note(first, digester(), request("a"), {"adapter": "one"})
    assert first.flush(5)
    note(second, digester(), request("a"), {"adapter": "two"})
    assert second.flush(5)
    assert record(Ledger(str(tmp_path)), text).names == {"adapter": "one"}
    (file,) = (tmp_path / "digests").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert isinstance(Ledger(str(tmp_path)).find(text), Forged)
    note(third, digester(), request("a"), {"adapter": "three"})
    assert third.flush(5)
    assert record(Ledger(str(tmp_path)), text).names == {"adapter": "three"}


def test_a_forged_record_is_told_from_a_missing_one(tmp_path: Path) -> None:
    ledger, of = writer(tmp_path), digester()
    one, other = note(ledger, of, request("one")), note(ledger, of, request("other"))
    assert ledger.flush(5)
    folder, reader = tmp_path / "digests", Ledger(str(tmp_path))
    assert reader.find(key_text(bytes(32))) is None
    (folder / f"{key_text(of.digest(request('one')), 128)}.json").write_bytes(  # type: ignore[arg-type]
        (folder / f"{key_text(of.digest(request('other')), 128)}.json").read_bytes()  # type: ignore[arg-type]
    )
    forged = reader.find(one)
    assert isinstance(forged, Forged)
    assert other in forged.reason
    assert record(reader, other).text == other


def test_a_forged_configuration_is_not_used(tmp_path: Path) -> None:
    ledger = writer(tmp_path)
    ledger.note_worker(digester())
    assert ledger.flush(5)
    identity = worker()["model_config"]
    assert isinstance(identity, Known)
    file = tmp_path / "configs" / f"{identity.identity.partition(':')[2]}.json"
    assert isinstance(Ledger(str(tmp_path)).config(identity.identity), dict)
    file.write_bytes(file.read_bytes().replace(b"10000", b"20000"))
    assert isinstance(Ledger(str(tmp_path)).config(identity.identity), Forged)


def test_links_and_pipes_in_a_ledger_are_not_read(tmp_path: Path) -> None:
    ledger, of = writer(tmp_path), digester()
    text = note(ledger, of, request("a"))
    assert ledger.flush(5)
    (file,) = (tmp_path / "digests").iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="cannot be read"):
        Ledger(str(tmp_path)).find(text)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Exception, match="cannot be read"):
        Ledger(str(tmp_path)).find(text)


def test_a_url_is_as_good_as_a_folder() -> None:
    url = "memory://ledger-of-these-tests/fleet"
    ledger, of = writer(url), digester()
    text = note(ledger, of, request("a"), {"adapter": "a"})
    assert ledger.flush(10)
    assert record(Ledger(url), text).names == {"adapter": "a"}
    assert record(Ledger(url), key_text(of.worker_digest)).worker_only


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    ledger = writer(f"file://{tmp_path}")
    text = note(ledger, digester(), request("a"))
    assert ledger.flush(5)
    assert record(Ledger(str(tmp_path)), text).text == text


@pytest.mark.parametrize("location", ["/proc/no-such-place/ledger", "nosuchscheme://user:hush@host/x"])
def test_a_ledger_out_of_reach_is_logged_once_and_harms_nothing(
    location: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = writer(location, limits=Limits(queued=10))
    of = digester()
    began = time.perf_counter()
    for number in range(1000):
        note(ledger, of, request(f"adapter-{number}"))
    assert time.perf_counter() - began < 1
    deadline = time.monotonic() + 10
    while not ledger.counts.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ledger.counts.failed == 1
    assert ledger.counts.dropped >= 1000 - 10 - 2
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    began = time.perf_counter()
    ledger.close(0.1)
    assert time.perf_counter() - began < 1
    (line,) = caplog.messages
    assert "1 failed" in line
    assert "hush" not in line


def test_what_failed_is_written_when_it_is_used_again(tmp_path: Path) -> None:
    blocked = tmp_path / "ledger"
    blocked.write_text("in the way")
    ledger = writer(blocked)
    text = note(ledger, digester(), request("a", "salt"))
    assert ledger.flush(5)
    assert ledger.counts.failed == 1
    blocked.unlink()
    note(ledger, digester(), request("a", "salt"))
    assert ledger.flush(5)
    assert record(Ledger(str(blocked)), text).text == text


def test_a_slow_ledger_slows_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    ledger = writer(tmp_path)
    monkeypatch.setattr(ledger, "_open", stuck.wait)
    of = digester()
    began = time.perf_counter()
    for number in range(200):
        note(ledger, of, request(f"adapter-{number}"))
    assert time.perf_counter() - began < 0.5
    assert not ledger.flush(0.05)
    stuck.set()


def test_a_flood_of_salts_is_bounded_and_does_not_keep_a_tenant_out(tmp_path: Path) -> None:
    """20,000 requests, each with a salt of its own, among which one tenant's come back every 100."""
    limits = Limits(queued=64, remembered=1000)
    ledger, of = writer(tmp_path, limits=limits), digester()
    halves = [request("standard", f"salt-{number}", None) for number in range(20_000)]
    texts = [key_text(of.digest(half)) for half in halves]
    tenant = request("standard", "a tenant that stays", None)
    ours = key_text(of.digest(tenant))
    tracemalloc.start()
    began, spent = time.perf_counter(), 0.0
    for number, (text, half) in enumerate(zip(texts, halves, strict=True)):
        at = time.perf_counter()
        ledger.note(text, of, half, {})
        spent += time.perf_counter() - at
        if number % 100 == 0:
            ledger.flush(5)
            if number >= 1000:
                ledger.note(ours, of, tenant, {})
                ledger.flush(5)
    assert ledger.flush(20)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = time.perf_counter() - began
    assert spent < 5, spent
    assert total < 20, total
    assert held < 4 << 20, held
    written = files(tmp_path / "digests")
    assert limits.first <= len(written) <= limits.first + limits.again + 2
    size = sum((tmp_path / name).stat().st_size for name in files(tmp_path))
    assert size < 2 << 20
    assert record(Ledger(str(tmp_path)), ours).text == ours
    counts = ledger.counts
    assert counts.written == len(written)
    assert counts.withheld + counts.dropped >= 19_000


def test_without_a_setting_nothing_is_recorded() -> None:
    silent = open_recorder(None, {}, logging.getLogger("x"))
    assert isinstance(silent, SilentRecorder)
    silent.note("x", digester(), request(), {})
    before = threading.active_count()
    silent.note_worker(digester())
    assert threading.active_count() == before


def test_many_threads_may_note_at_once(tmp_path: Path) -> None:
    ledger, of = writer(tmp_path), digester()
    halves = [request(f"adapter-{number}") for number in range(20)]

    def run() -> None:
        for half in halves:
            note(ledger, of, half)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.flush(10)
    assert len(files(tmp_path / "digests")) == ledger.counts.written == 20


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    ledger = writer(tmp_path)
    hostile = "\x1b]0;x\x07<script>alert(1)</script>\ud800" + "n" * 10_000
    text = note(ledger, digester(), request("a"), {"adapter": hostile})
    assert ledger.flush(5)
    (file,) = (tmp_path / "digests").iterdir()
    assert file.stat().st_size < 3000
    assert "\x1b" not in file.read_text(encoding="ascii")
    assert json.loads(file.read_text())["record"]["names"]["adapter"].startswith("\x1b]0;x\x07<script>")
    assert record(Ledger(str(tmp_path)), text).text == text


def test_registries_with_withheld_or_added_dimensions_are_recorded(tmp_path: Path) -> None:
    registry: Any = Registry()
    ledger = writer(tmp_path)
    of = Digester(registry, {})
    text = note(ledger, of, {})
    assert ledger.flush(5)
    assert record(Ledger(str(tmp_path)), text).descriptor.worker == {}
