"""The worker's side: descriptors of digests in use go to the ledger, off the request path."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvprov.contract.descriptor import Known, Value
from kvprov.contract.digest import Digester
from kvprov.contract.dimensions import ADAPTER
from kvprov.errors import LedgerError
from kvprov.identity.preimages import preimage_of
from kvprov.ledger.admission import Admission, Limits, Remembered
from kvprov.ledger.location import Files, Location, open_files, shown_location
from kvprov.ledger.record import (
    CONFIG_IDENTITY,
    CONFIGS,
    DIGESTS,
    MAX_RECORD_BYTES,
    WORKERS,
    compose,
    file_of,
    record_name,
    verify,
)

REPORT_SECONDS: Final = 600.0
"""How long the log is silent after a line about records that were not written."""

MAX_WAIT_SECONDS: Final = 60.0
"""Most that the writer waits before it tries an unreachable ledger again."""

EXIT_SECONDS: Final = 2.0

_CONFIGS_DEPTH: Final = 4
_NONCE: Final = "nonce:"


class Recorder(Protocol):
    """What an engine's binding tells of the digests that it uses."""

    def note(self, text: str, digester: Digester, request: Mapping[str, Value], names: Mapping[str, str]) -> None:
        """Record what `text` stands for, unless it is recorded already."""

    def note_worker(self, digester: Digester) -> None:
        """Record a worker half by itself."""


class SilentRecorder:
    """Records nothing: there is no ledger."""

    def note(self, text: str, digester: Digester, request: Mapping[str, Value], names: Mapping[str, str]) -> None:
        """Do nothing."""

    def note_worker(self, digester: Digester) -> None:
        """Do nothing."""


def open_recorder(location: Location | None, facts: Mapping[str, str], logger: logging.Logger) -> Recorder:
    """Return what records an engine's digests. Nothing is opened yet, and nothing is written before the first note.

    Args:
        location: `KVPROV_LEDGER`, or None for no ledger.
        facts: What the engine says of itself; it shows in every record. No secrets.
        logger: For what could not be written.
    """
    return SilentRecorder() if location is None else LedgerWriter(location, facts, logger)


@dataclass(frozen=True, slots=True)
class _Note:
    digester: Digester
    request: Mapping[str, Value] | None
    names: Mapping[str, str]
    text: str


@dataclass(slots=True)
class Counts:
    """What became of the digests that were noted.

    Attributes:
        written: Records that are in the ledger now, whoever wrote them.
        withheld: Digests that were left out, since clients chose too many (see `Limits`).
        dropped: Digests that found the queue full.
        failed: Records that could not be written.
    """

    written: int = 0
    withheld: int = 0
    dropped: int = 0
    failed: int = 0


def _passing(values: Mapping[str, Value]) -> bool:
    """Whether a half holds a number that is used once: nobody will ever ask what it was."""
    return any(isinstance(value, Known) and value.identity.startswith(_NONCE) for value in values.values())


class LedgerWriter:
    """Records the digests of one worker.

    `note` never blocks, raises nothing, and remembers a bounded number of digests. All else happens in a thread of its
    own, which starts with the first note: opening the ledger, deciding what is recorded, writing, and waiting for a
    ledger that is out of reach.

    Args:
        location: Where the ledger is.
        facts: What the worker says of itself; it shows in every record. No secrets.
        logger: For what could not be written.
        limits: How much is recorded and remembered.
        clock: Gives seconds.
    """

    def __init__(
        self,
        location: Location,
        facts: Mapping[str, str],
        logger: logging.Logger,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._location = location
        self._facts = dict(facts)
        self._logger = logger
        self._clock = clock
        self._known = Remembered(limits.remembered)
        self._workers = Remembered(limits.remembered)
        self._admission = Admission(limits, clock)
        self._queue: queue.Queue[_Note] = queue.Queue(limits.queued)
        self._files: Files | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._wait = 0.0
        self._reported: tuple[float, Counts] | None = None

    # Any thread.

    def note(self, text: str, digester: Digester, request: Mapping[str, Value], names: Mapping[str, str]) -> None:
        """Record what `text` stands for, unless it is recorded already.

        Args:
            text: The digest's text, of either form.
            digester: Of the worker half.
            request: The request half, of known and absent values. It must not be changed afterwards.
            names: What the engine calls values, by dimension.
        """
        if text not in self._known:
            self._put(_Note(digester, request, names, text))

    def note_worker(self, digester: Digester) -> None:
        """Record a worker half by itself, so that a worker is known before it has served a request."""
        self._put(_Note(digester, None, {}, ""))

    def flush(self, seconds: float) -> bool:
        """Wait until all that was noted has been dealt with, at most `seconds`, and return whether it has."""
        deadline = time.monotonic() + seconds
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._queue.all_tasks_done.wait(left)
        return True

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """Write what can be written within `seconds`, and end the thread."""
        if self._thread is not None:
            self.flush(seconds)
            atexit.unregister(self.close)
        self._closing.set()

    def _put(self, note: _Note) -> None:
        try:
            self._queue.put_nowait(note)
        except queue.Full:
            self.counts.dropped += 1
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="kvprov-ledger", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    # The writer's own thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                note = self._queue.get(timeout=1.0)
            except queue.Empty:
                continue
            error: Exception | None = None
            try:
                self._record(note)
                self._wait = 0.0
            except Exception as raised:  # noqa: BLE001 - fsspec's file systems raise what their services' clients raise
                self.counts.failed += 1
                error = raised
            finally:
                self._queue.task_done()
            self._report(error)
            if error is not None:
                self._wait = min(MAX_WAIT_SECONDS, max(1.0, 2 * self._wait))
                self._closing.wait(self._wait)

    def _record(self, note: _Note) -> None:
        if _passing(note.digester.worker):
            return
        if note.request is None:
            self._record_worker(note.digester)
            return
        if note.text in self._known or _passing(note.request):
            return
        # The adapter's bytes have to be loaded before they are in a digest. What else a request brings costs nothing.
        chosen = any(isinstance(v, Known) for name, v in note.request.items() if name != ADAPTER.name)
        bucket = self._admission.admit(note.text, chosen=chosen)
        if bucket is None:
            self.counts.withheld += 1
            return
        try:
            self._record_worker(note.digester)
            digester = note.digester
            data = compose(digester.registry, digester.worker, note.request, facts=self._facts, names=note.names)
            self._place(DIGESTS, digester.digest(note.request), data, worker_only=False)
        except BaseException:
            bucket.give_back()
            raise
        self._known.add(note.text)
        self.counts.written += 1

    def _record_worker(self, digester: Digester) -> None:
        if digester.worker_digest in self._workers:
            return
        for value in digester.worker.values():
            if isinstance(value, Known):
                self._record_config(value.identity, _CONFIGS_DEPTH)
        data = compose(digester.registry, digester.worker, {}, facts=self._facts, names={}, worker_only=True)
        self._place(WORKERS, digester.worker_digest, data, worker_only=True)
        self._workers.add(digester.worker_digest)

    def _record_config(self, identity: str, depth: int) -> None:
        """Write the preimage of `identity`, and those of the identities in it (of a draft model, say)."""
        match = CONFIG_IDENTITY.fullmatch(identity)
        preimage = None if match is None else preimage_of(identity)
        if match is None or preimage is None or depth == 0:
            return
        for within in CONFIG_IDENTITY.finditer(preimage.decode()):
            self._record_config(within[0], depth - 1)
        name = file_of(CONFIGS, match[1])
        files = self._open()
        if files.read(name, len(preimage)) != preimage:
            files.write(name, preimage)

    def _place(self, folder: str, digest: bytes, data: bytes, *, worker_only: bool) -> None:
        """Write a record, unless a sound one is there: its first writer's stays. A broken or forged one is replaced."""
        name = file_of(folder, record_name(digest))
        files = self._open()
        there = files.read(name, MAX_RECORD_BYTES)
        if there is None or isinstance(verify(there, digest, worker_only=worker_only), str):
            files.write(name, data)

    def _open(self) -> Files:
        if self._files is None:
            self._files = open_files(self._location)
        return self._files

    def _report(self, error: Exception | None) -> None:
        counts, now = self.counts, self._clock()
        at, told = self._reported or (-REPORT_SECONDS, Counts())
        missed = (counts.withheld - told.withheld, counts.dropped - told.dropped, counts.failed - told.failed)
        if not any(missed) or (self._reported is not None and now - at < REPORT_SECONDS):
            return
        self._reported = (now, Counts(counts.written, counts.withheld, counts.dropped, counts.failed))
        # The error's own text may hold a URL with credentials.
        why = "" if error is None else f" ({error.message if isinstance(error, LedgerError) else type(error).__name__})"
        self._logger.warning(
            "kvprov: ledger %s: not recorded: %d beyond the rate of salted requests, %d with the queue full, "
            "%d failed%s. Keys and requests are not affected.",
            shown_location(self._location),
            *missed,
            why,
        )
