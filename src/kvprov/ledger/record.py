"""Records of a ledger: how they are named, written, and verified when they are read.

    digests/NAME.json    a document (specification, section 8) whose digest has the text NAME
    workers/NAME.json    a document without request dimensions, whose worker digest has the text NAME
    configs/HEX.json     the RFC 8785 JSON of which `config-v1-sha256:HEX` is the hash

NAME is the short form of 22 characters, which both forms of a text lead to. So every file is named by its content, and
whoever reads one computes the name anew. The member `record` of a document is beside that: what its writer says of
itself, which nothing vouches for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvprov.contract.descriptor import Absent, Descriptor, Known, Value
from kvprov.contract.document import DocumentError, Evaluation, evaluate, parse_document
from kvprov.contract.errors import ContractError
from kvprov.contract.key import DigestBits, key_text
from kvprov.contract.registry import Registry
from kvprov.identity.canonical import SCHEME

DIGESTS: Final = "digests"
WORKERS: Final = "workers"
CONFIGS: Final = "configs"

MAX_RECORD_BYTES: Final = 1 << 18
MAX_NOTE_CHARACTERS: Final = 256
MAX_NOTES: Final = 16
MAX_CONFIG_DEPTH: Final = 32

CONFIG_IDENTITY: Final = re.compile(rf"{re.escape(SCHEME)}:([0-9a-f]{{64}})")

_TEXT: Final = re.compile(r"[A-Za-z0-9_-]{22}|[A-Za-z0-9_-]{43}")


def digest_prefix(text: str) -> bytes | None:
    """Return the bytes that a digest's text stands for, 32 or the first 16 of them, or None when it is no such text."""
    if _TEXT.fullmatch(text) is None:
        return None
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return None
    # Several texts decode to the same bytes; one of them is written.
    return data if base64.urlsafe_b64encode(data).rstrip(b"=").decode() == text else None


def record_name(digest: bytes) -> str:
    """Return the name of the record of `digest`, given at least its first 16 bytes."""
    return key_text(digest, DigestBits.SHORT)


def file_of(folder: str, name: str) -> str:
    """Return the path of a file within the ledger."""
    return f"{folder}/{name}.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One record whose descriptor encodes to its name.

    Attributes:
        registry: The dimensions that its worker binds.
        descriptor: Their values. The request half is empty in the record of a worker.
        evaluation: What the descriptor comes to.
        worker_only: Whether it is the record of a worker half.
        facts: What the writer says of itself: engine, release, connector... Not verified.
        names: What it calls values, by dimension: the adapter's name. Tenants choose some. Not verified.
    """

    registry: Registry
    descriptor: Descriptor
    evaluation: Evaluation
    worker_only: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The digest's text of 43 characters; a worker digest's for the record of a worker."""
        return key_text(self.evaluation.worker_digest) if self.worker_only else self.evaluation.text


def _value(value: Value) -> dict[str, str]:
    assert isinstance(value, Absent | Known), "an unknown value is recorded nowhere"
    return {"state": "known", "identity": value.identity} if isinstance(value, Known) else {"state": "absent"}


def cut(text: str) -> str:
    """Return as much of `text` as is kept of a name or a fact; half a surrogate pair becomes a question mark."""
    return text[:MAX_NOTE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")


def compose(
    registry: Registry,
    worker: Mapping[str, Value],
    request: Mapping[str, Value],
    *,
    facts: Mapping[str, str],
    names: Mapping[str, str],
    worker_only: bool = False,
) -> bytes:
    """Return a record as bytes: JSON of printable ASCII, so that no reader of the file meets a control character."""
    document: dict[str, Any] = {
        "registry": {"worker": list(registry.worker), "request": [] if worker_only else list(registry.request)},
        "descriptor": {
            "worker": {name: _value(worker[name]) for name in registry.worker},
            "request": {} if worker_only else {name: _value(request[name]) for name in registry.request},
        },
        "record": {
            "facts": {cut(name): cut(text) for name, text in list(facts.items())[:MAX_NOTES]},
            "names": {cut(name): cut(text) for name, text in list(names.items())[:MAX_NOTES]},
        },
    }
    return (json.dumps(document, indent=1) + "\n").encode("ascii")


def _notes(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {cut(name): cut(text) for name, text in list(value.items())[:MAX_NOTES] if isinstance(text, str)}


def verify(data: bytes, digest: bytes, *, worker_only: bool) -> Record | str:
    """Read a record, and return it when its descriptor encodes to `digest`; else return why it counts for nothing.

    Args:
        data: The file's bytes, of which no more than `MAX_RECORD_BYTES` may be there.
        digest: The digest that was asked for, 32 bytes or the first 16.
        worker_only: Whether it is the record of a worker.
    """
    if len(data) > MAX_RECORD_BYTES:
        return f"it has more than {MAX_RECORD_BYTES} bytes"
    try:
        registry, descriptor = parse_document(data)
        evaluation = evaluate(registry, descriptor)
    except (DocumentError, ContractError) as error:
        return f"it is no record: {error.message}"
    if worker_only and (registry.request or descriptor.request):
        return "it is no record of a worker: it has a request half"
    found = evaluation.worker_digest if worker_only else evaluation.digest
    if found[: len(digest)] != digest:
        return f"its descriptor encodes to {key_text(found)}"
    loaded = json.loads(data).get("record")
    notes = loaded if isinstance(loaded, dict) else {}
    return Record(registry, descriptor, evaluation, worker_only, _notes(notes.get("facts")), _notes(notes.get("names")))


def verify_config(data: bytes, hexdigest: str) -> Mapping[str, Any] | str:
    """Return a configuration when it is what `config-v1-sha256:HEX` is the hash of; else why it counts for nothing."""
    if hashlib.sha256(data).hexdigest() != hexdigest:
        return "its bytes have another hash than its name says"
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError):
        return "it is no JSON"
    if not isinstance(loaded, dict):
        return "it is no object"
    return loaded if _depth(loaded) <= MAX_CONFIG_DEPTH else f"it is nested deeper than {MAX_CONFIG_DEPTH} levels"


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        level = [
            item
            for held in level
            for item in (held.values() if isinstance(held, dict) else held)
            if isinstance(item, dict | list)
        ]
    return depth
