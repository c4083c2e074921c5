"""What separates two digests, in words. Texts are plain: whoever shows them escapes them for where they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvprov.contract.descriptor import Absent, Known, Value
from kvprov.contract.dimension import Half
from kvprov.contract.dimensions import ADAPTER, BUILT_IN, CLIENT_NAMESPACE, SHARING_DOMAIN
from kvprov.ledger.fields import Field, Preimages, differences, flat
from kvprov.ledger.record import Record

MAX_FIELDS_IN_WORDS: Final = 4
MAX_VALUE_CHARACTERS: Final = 60
_KEYED: Final = re.compile(r"hmac-sha256\.([a-z0-9-]+):.*")
_WHAT: Final = {SHARING_DOMAIN.name: ("salt", "salts"), CLIENT_NAMESPACE.name: ("namespace", "namespaces")}


@dataclass(frozen=True, slots=True)
class Side:
    """One dimension of one digest.

    Attributes:
        dimension: Its name.
        half: `worker` or `request`.
        kind: `computational` or `permission`; empty for dimensions of other packages.
        identity: Its value's identity; None where it is absent.
        words: What that means.
        fields: The configuration that the identity is the hash of, by path; None where it is none or not recorded.
    """

    dimension: str
    half: str
    kind: str
    identity: str | None
    words: str
    fields: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Separation:
    """A dimension that separates two digests.

    Attributes:
        dimension: Its name.
        kind: As in `Side`.
        words: How, in a sentence.
        fields: The fields that differ, where both configurations are recorded.
    """

    dimension: str
    kind: str
    words: str
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """What separates two digests.

    Attributes:
        separations: Dimension by dimension; none when nothing does.
        unregistered: Dimensions that only one of the two registries has.
        only_worker_halves: Whether request halves were left out, since one of the records is of a worker.
    """

    separations: tuple[Separation, ...]
    unregistered: tuple[str, ...]
    only_worker_halves: bool

    @property
    def same(self) -> bool:
        """Whether nothing that was compared differs."""
        return not self.separations

    @property
    def words(self) -> str:
        """The outcome, in a sentence."""
        if self.same and self.only_worker_halves:
            return "Both workers are the same: requests of equal adapter and tenant share."
        if self.same:
            return "Both are one digest: entries of equal tokens are shared."
        names = [separation.dimension for separation in self.separations]
        listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        return f"Neither finds the other's entries: {listed} {'separates' if len(names) == 1 else 'separate'} them."


def _kind(name: str) -> str:
    return str(BUILT_IN[name].kind) if name in BUILT_IN else ""


def _values(record: Record, half: Half) -> Mapping[str, Value]:
    return record.descriptor.worker if half is Half.WORKER else record.descriptor.request


def _identity(value: Value) -> str | None:
    return value.identity if isinstance(value, Known) else None


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


def _adapter(record: Record) -> str:
    name = record.names.get(ADAPTER.name)
    return f"the adapter that its worker calls {_short(name)!r}" if name else "an adapter whose name is not recorded"


def _meaning(record: Record, name: str, value: Value) -> str:
    if isinstance(value, Absent):
        if name == ADAPTER.name:
            return "no adapter"
        return f"no {_WHAT[name][0]}" if name in _WHAT else "does not apply"
    identity = _identity(value) or ""
    scheme, _, payload = identity.partition(":")
    if scheme == "nonce":
        return "not known; a number of its own that is used once"
    if scheme == "label":
        return f"declared as {payload}"
    if name == ADAPTER.name:
        return _adapter(record)
    if name in _WHAT:
        keyed = _KEYED.fullmatch(identity)
        return f"a {_WHAT[name][0]}, hashed " + (f"with the fleet secret {keyed[1]}" if keyed else "without a secret")
    return "by content" if scheme.startswith(("tensors-", "config-", "adapter-")) else "of another package"


def describe(record: Record, preimages: Preimages) -> list[Side]:
    """Return what a record's digest is bound to, dimension by dimension, the worker's first."""
    sides = []
    for half in Half:
        for name, value in sorted(_values(record, half).items()):
            identity = _identity(value)
            config = None if identity is None else preimages(identity)
            sides.append(
                Side(
                    name,
                    str(half),
                    _kind(name),
                    identity,
                    _meaning(record, name, value),
                    None if config is None else dict(flat(config)),
                )
            )
    return sides


def _fields_in_words(fields: tuple[Field, ...]) -> str:
    def shown(value: str | None) -> str:
        return "absent" if value is None else _short(value)

    # What stands further out says more: the method before its parameters.
    ordered = sorted(fields, key=lambda f: (f.path.count("."), f.path))
    parts = [
        f"{_short(f.path)} is {shown(f.first)} in the first and {shown(f.second)} in the second"
        for f in ordered[:MAX_FIELDS_IN_WORDS]
    ]
    more = len(fields) - MAX_FIELDS_IN_WORDS
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _separation(
    name: str, first: Record, second: Record, values: tuple[Value, Value], preimages: Preimages
) -> Separation:
    one, other = (_identity(value) for value in values)
    meanings = _meaning(first, name, values[0]), _meaning(second, name, values[1])
    words = f"the first has {meanings[0]}, the second {meanings[1]}"
    fields: tuple[Field, ...] = ()
    if one is not None and other is not None:
        schemes = one.partition(":")[0], other.partition(":")[0]
        configs = preimages(one), preimages(other)
        if configs[0] is not None and configs[1] is not None:
            fields = tuple(differences(configs[0], configs[1], preimages))
            words = _fields_in_words(fields)
        elif name in _WHAT and schemes[0] != schemes[1]:
            words = f"{words}; by their identities alone it cannot be told whether the {_WHAT[name][1]} are equal"
        elif name in _WHAT:
            words = f"two different {_WHAT[name][1]}, {meanings[0].partition(', ')[2]}"
        elif name == ADAPTER.name and schemes[0] == schemes[1]:
            words = f"two adapters of different content: {words}"
        elif "config-" in schemes[0] and schemes[0] == schemes[1]:
            words = "two different configurations, of which the ledger does not hold both"
        elif schemes[0] == schemes[1] and meanings == ("by content", "by content"):
            words = "different content"
        elif meanings[0] == meanings[1]:
            words = f"{_short(one)} and {_short(other)}"
    return Separation(name, _kind(name), words, fields)


def compare(first: Record, second: Record, preimages: Preimages) -> Comparison:
    """Return what separates two digests. Where a record is of a worker, worker halves alone are compared.

    Args:
        first: One record.
        second: The other.
        preimages: Gives the configurations of identities.
    """
    only_workers = first.worker_only or second.worker_only
    separations = []
    unregistered = []
    for half in (Half.WORKER,) if only_workers else tuple(Half):
        ours, theirs = _values(first, half), _values(second, half)
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                where = "first" if name in ours else "second"
                unregistered.append(name)
                words = f"only the worker of the {where} binds this dimension, and keys of two registries never meet"
                separations.append(Separation(name, _kind(name), words))
            elif ours[name] != theirs[name]:
                separations.append(_separation(name, first, second, (ours[name], theirs[name]), preimages))
    return Comparison(tuple(separations), tuple(unregistered), only_workers)
