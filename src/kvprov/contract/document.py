"""Documents: a registry and a descriptor as JSON, the form of the test vectors (specification, section 8).

    {"registry": {"worker": ["weights"], "request": ["adapter", "sharing_domain"]},
     "descriptor": {"worker": {"weights": {"state": "known", "identity": "label:run-7/3"}},
                    "request": {"adapter": {"state": "absent"},
                                "sharing_domain": {"state": "unknown", "reason": "no secret"}}}}

Reading a document checks names and identities; encoding what was read checks the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from kvprov.contract.descriptor import ABSENT, Absent, Descriptor, Known, Unknown, Value
from kvprov.contract.digest import digest, worker_digest
from kvprov.contract.dimension import Dimension, Half, Kind, check_name
from kvprov.contract.encoding import encode
from kvprov.contract.errors import ContractError, ErrorCode, KvprovError
from kvprov.contract.key import DigestBits, key_text
from kvprov.contract.registry import Registry

_SHOWN_CHARACTERS: Final = 64


class DocumentError(KvprovError, ValueError):
    """Text that is not a document: broken JSON, or another shape.

    Attributes:
        where: The place in the document, as in `descriptor.worker['weights']`.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}.", "Compare with the form in section 8 of spec/kv-provenance-v1.md.")
        self.where = where


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a descriptor comes to.

    Attributes:
        enc: The encoding, the preimage of `digest`.
        digest: 32 bytes.
        worker_digest: 32 bytes, of the worker half alone.
        text: `digest` as 43 characters, as it enters keys.
        text_128: The first 16 bytes of `digest` as 22 characters.
    """

    enc: bytes
    digest: bytes
    worker_digest: bytes
    text: str
    text_128: str


class _Object(tuple[tuple[str, object], ...]):
    """A JSON object as the text has it, doubled keys included: a dict would hide them."""

    __slots__ = ()


# Text is an identity whose grammar is not checked yet: the shape of the whole document is checked first.
_RawValue: TypeAlias = str | Absent | Unknown


def parse_document(text: str | bytes) -> tuple[Registry, Descriptor]:
    """Read a document. Rules are checked in the order of the specification, section 6, steps 1 to 5.

    Members of the outermost object other than `registry` and `descriptor` are ignored, so that a test vector
    is a document. Dimensions are computational, and say nothing of why they are bound.

    Args:
        text: JSON; bytes are UTF-8.

    Raises:
        DocumentError: `text` is no JSON, or has another shape.
        ContractError: `bad_name`, `doubled_dimension` or `bad_identity`.
    """
    document = _members(_load(text), "document")
    for member in ("registry", "descriptor"):
        if member not in document:
            raise DocumentError("document", f"the member {member!r} is missing")
    names = {half: _names(value, f"registry.{half}") for half, value in _halves(document["registry"], "registry")}
    entries = {
        half: _entries(value, f"descriptor.{half}") for half, value in _halves(document["descriptor"], "descriptor")
    }

    registry = Registry([Dimension(name, half, Kind.COMPUTATIONAL, "") for half in Half for name in names[half]])
    for half in Half:
        for name, _ in entries[half]:
            check_name(name)
    for half in Half:
        _check_single(half, [name for name, _ in entries[half]])
    values = {half: {name: _value(raw) for name, raw in entries[half]} for half in Half}
    return registry, Descriptor(values[Half.WORKER], values[Half.REQUEST])


def evaluate(registry: Registry, descriptor: Descriptor) -> Evaluation:
    """Return everything that the contract derives from `descriptor`.

    Raises:
        ContractError: `missing_dimension`, `unregistered_dimension` or `unknown_value`.
    """
    whole = digest(registry, descriptor)
    return Evaluation(
        enc=encode(registry, descriptor),
        digest=whole,
        worker_digest=worker_digest(registry, descriptor.worker),
        text=key_text(whole),
        text_128=key_text(whole, DigestBits.SHORT),
    )


def _refuse_constant(constant: str) -> NoReturn:
    raise DocumentError("document", f"{constant} is not JSON")


def _load(text: str | bytes) -> object:
    try:
        # Decoded here, since json.loads would guess at UTF-16 and UTF-32.
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        loaded: object = json.loads(decoded, object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError("document", "it is nested too deeply") from None
    except ValueError as error:
        raise DocumentError("document", f"it is not JSON in UTF-8 ({error})") from None
    return loaded


def _object(value: object, where: str) -> _Object:
    if not isinstance(value, _Object):
        raise DocumentError(where, "an object is expected")
    return value


def _members(value: object, where: str) -> dict[str, object]:
    members: dict[str, object] = {}
    for key, member in _object(value, where):
        if key in members:
            raise DocumentError(where, f"the member {_shown(key)} occurs twice")
        members[key] = member
    return members


def _exact_members(value: object, where: str, required: frozenset[str], optional: str = "") -> dict[str, object]:
    members = _members(value, where)
    for key in sorted(required - members.keys()):
        raise DocumentError(where, f"the member {key!r} is missing")
    for key in members:
        if key not in required and key != optional:
            raise DocumentError(where, f"the member {_shown(key)} does not belong here")
    return members


def _halves(value: object, where: str) -> list[tuple[Half, object]]:
    members = _exact_members(value, where, frozenset(Half))
    return [(half, members[half]) for half in Half]


def _names(value: object, where: str) -> list[str]:
    if not isinstance(value, list):
        raise DocumentError(where, "a list of names is expected")
    return [_text(name, f"{where}[{index}]") for index, name in enumerate(value)]


def _entries(value: object, where: str) -> list[tuple[str, _RawValue]]:
    return [(name, _raw_value(raw, f"{where}[{_shown(name)}]")) for name, raw in _object(value, where)]


def _raw_value(value: object, where: str) -> _RawValue:
    state = _members(value, where).get("state")
    if state == "absent":
        _exact_members(value, where, frozenset({"state"}))
        return ABSENT
    if state == "known":
        members = _exact_members(value, where, frozenset({"state", "identity"}))
        return _text(members["identity"], f"{where}.identity")
    if state == "unknown":
        members = _exact_members(value, where, frozenset({"state"}), optional="reason")
        return Unknown(_text(members.get("reason", ""), f"{where}.reason"))
    raise DocumentError(where, "the state must be 'absent', 'known' or 'unknown'")


def _value(raw: _RawValue) -> Value:
    return Known(raw) if isinstance(raw, str) else raw


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DocumentError(where, "text is expected")
    return value


def _check_single(half: Half, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ContractError(
                ErrorCode.DOUBLED_DIMENSION,
                name,
                f"The {half} half has two values for {name!r}.",
                "Keep one of the two.",
            )
        seen.add(name)


def _shown(name: str) -> str:
    # repr, so that no control character of a document reaches a terminal.
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "...")
