"""What is tried beside the values of a space: content in other places, and keys that must not be equal, by the hundred.

A trial looks at keys first. Only where two are equal that must not be, or differ that need not, is state asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvprov.check import lora
from kvprov.check.bench import Bench, Values, copy_adapter, link_files
from kvprov.check.case import Case
from kvprov.check.results import ELSEWHERE, IN_PLACE, RENAMED, Pair, Trial
from kvprov.check.space import Candidate
from kvprov.check.verdicts import Fault, Finding, Verdict, bits_left, judge
from kvprov.contract.descriptor import Descriptor, Known, Value
from kvprov.contract.dimensions import ADAPTER, CLIENT_NAMESPACE, SHARING_DOMAIN, WEIGHTS
from kvprov.contract.registry import Registry
from kvprov.identity.domain import FleetSecret, client_namespace, sharing_domain

SALTS: Final = 2048
"""Of 2^16 keys, that many hit one twice with all but certainty: about 32 times."""
ADAPTERS: Final = 1024
"""About 8 times of 2^16."""
VARIANT_BYTES: Final = 2 << 30
"""How much is written for variants of one adapter."""

SEPARATORS: Final = ("", "/", ":", "|", "-", "_", ",", ".", "@", "#", " ", "\n", "\0")
STAND_INS: Final = ("None", "null", "none", "NULL", "0", "-", "default")
"""What code writes where there is no value."""

KeyOf = Callable[[Case], bytes]


@dataclass(slots=True)
class Found:
    """What trials add to what is said of one dimension."""

    pairs: list[Pair] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, dimension: str, verdict: Verdict, fault: Fault, message: str) -> None:
        """Note what is wrong."""
        self.findings.append(Finding(dimension, verdict, fault, message))


class Trials:
    """Tries one key function.

    Args:
        bench: Makes cases and state.
        registry: The dimensions that are bound.
        key: The key function.
        secret: The fleet's secret.
        scratch: A folder for what is written, of this key function's own.
    """

    def __init__(self, bench: Bench, registry: Registry, key: KeyOf, secret: FleetSecret | None, scratch: Path) -> None:
        self._bench = bench
        self._registry = registry
        self._key = key
        self._secret = secret
        self._scratch = scratch

    def _values(self, candidate: Candidate) -> Values:
        return {**self._bench.space.base, candidate.dimension: candidate}

    # Content in other places.

    def places(self, dimension: str) -> Found:
        """Try a checkpoint or an adapter at another path, under another name, and with other content in its place."""
        found = Found()
        candidates = [c for c in self._bench.space.candidates[dimension] if c.folder is not None]
        first = candidates[0]
        assert first.folder is not None
        # Of one name, under another folder; then under another name beside it.
        elsewhere = self._key_at(first, self._scratch / "elsewhere" / first.folder.name)
        renamed = self._key_at(first, self._scratch / "elsewhere" / f"{first.folder.name}-renamed")
        own = self._key(self._bench.case(self._values(first), self._registry))
        for how, key in ((ELSEWHERE, elsewhere), (RENAMED, renamed)):
            found.pairs.append(Pair(first.name, first.name, how, judge(False, key == own), key == own))
        if elsewhere != own:
            message = f"{first.name} has another key when its folder is at another path."
            found.add(dimension, Verdict.OVER_SEPARATED, Fault.PATH, message)
        elif renamed != own:
            message = f"{first.name} has another key when its folder has another name."
            found.add(dimension, Verdict.OVER_SEPARATED, Fault.NAME, message)
        if len(candidates) > 1:
            self._in_place(dimension, candidates[0], candidates[1], found, by_name=elsewhere == own != renamed)
        return found

    def _key_at(self, candidate: Candidate, at: Path) -> bytes:
        return self._key(self._case_at(candidate, at))

    def _case_at(self, candidate: Candidate, at: Path) -> Case:
        assert candidate.folder is not None
        values = self._values(candidate)
        if candidate.dimension == WEIGHTS.name:
            return self._bench.case(values, self._registry, model_at=link_files(candidate.folder, at))
        return self._bench.case(values, self._registry, adapter_at=copy_adapter(candidate.folder, at))

    def _in_place(self, dimension: str, a: Candidate, b: Candidate, found: Found, *, by_name: bool) -> None:
        slot = self._scratch / "slot" / dimension
        same = self._key_at(a, slot) == self._key_at(b, slot)
        difference = self._bench.difference(self._values(a), self._values(b))
        if difference.equal:
            return
        found.pairs.append(Pair(a.name, b.name, IN_PLACE, judge(True, same), same, difference))
        if same:
            fault = Fault.NAME if by_name else Fault.PATH
            message = f"{a.name} and {b.name} have one key when the second replaces the first at its path."
            found.add(dimension, Verdict.OMISSION, fault, message)

    # Adapters that differ in one place.

    def variants(self) -> Found:
        """Try an adapter with each of its tensors changed by itself, with two exchanged, and with another scale."""
        found = Found()
        first = self._adapter()
        assert first.folder is not None
        original = lora.read_adapter(first.folder)
        every = list(lora.variants(original))
        size = sum(path.stat().st_size for path in first.folder.iterdir())
        chosen = _spread(every, max(8, VARIANT_BYTES // max(size, 1)))
        slot = self._scratch / "slot" / first.folder.name
        lora.write_adapter(original, slot)
        key = self._key(self._bench.case(self._values(first), self._registry, adapter_at=slot))
        equal = 0
        for variant in chosen:
            lora.write_adapter(variant.adapter, slot)
            changed = Candidate(ADAPTER.name, f"{first.name} with {variant.what} changed", folder=slot)
            if self._key(self._bench.case(self._values(changed), self._registry)) != key:
                continue
            # Now the state decides. It must be asked while the slot holds this adapter.
            difference = self._bench.difference(self._values(changed), self._values(first))
            if difference.equal:
                continue
            equal += 1
            found.pairs.append(Pair(first.name, changed.name, IN_PLACE, Verdict.OMISSION, True, difference))
            message = f"Adapters that differ in {variant.what} have one key, and their state differs."
            found.add(ADAPTER.name, Verdict.OMISSION, variant.fault, message)
        what = f"{first.name}, changed in one place" + (
            f" ({len(chosen)} of {len(every)} places)" if len(chosen) < len(every) else ""
        )
        found.trials.append(Trial(what, len(chosen) + 1, equal))
        return found

    def _adapter(self) -> Candidate:
        return next(c for c in self._bench.space.candidates[ADAPTER.name] if c.folder is not None)

    # Many values at once.

    def many_salts(self) -> Found:
        """Try many salts: a key that lost most of their bits has some in common."""
        found = Found()
        base = self._base()
        cases = ((f"salt {i}", _with(base, self._secret, salt=f"kvprov-check-{i}")) for i in range(SALTS))
        equal = self._equal(cases)
        found.trials.append(Trial("salts", SALTS, len(equal)))
        if equal:
            a, b = equal[0]
            bits = bits_left(SALTS, len(equal))
            message = f"{len(equal)} pairs of {SALTS} salts have one key, so about {bits:.0f} bits are left of them."
            found.pairs.append(Pair(a, b, "two of many", Verdict.OMISSION, True, share_allowed=False))
            found.add(SHARING_DOMAIN.name, Verdict.OMISSION, Fault.TRUNCATED, message)
        return found

    def many_adapters(self) -> Found:
        """Try many small adapters: a key that lost most bits of their identity has some in common."""
        found = Found()
        modules = lora.targets(self._bench.model.folder)
        if not modules:
            return found
        # One layer, rank one: a few kilobytes, which the model nevertheless runs.
        name = min(modules)
        slot = self._scratch / "slot" / "small"

        def put(seed: int) -> Values:
            lora.write_adapter(lora.generate({name: modules[name]}, seed, rank=1), slot)
            return self._values(Candidate(ADAPTER.name, f"generated adapter {seed}", folder=slot))

        def cases() -> Iterator[tuple[str, Case]]:
            for seed in range(ADAPTERS):
                values = put(seed)
                yield str(seed), self._bench.case(values, self._registry)

        equal = self._equal(cases())
        found.trials.append(Trial("generated adapters", ADAPTERS, len(equal)))
        if equal:
            a, b = (int(seed) for seed in equal[0])
            values = put(a)
            # Kept under its name before the slot holds the other.
            self._bench.state(values)
            difference = self._bench.difference(values, put(b))
            pair = Pair(f"generated adapter {a}", f"generated adapter {b}", "two of many", Verdict.OMISSION, True)
            if not difference.equal:
                bits = bits_left(ADAPTERS, len(equal))
                found.pairs.append(replace(pair, difference=difference))
                message = f"{len(equal)} pairs of {ADAPTERS} adapters have one key, so about {bits:.0f} bits are left."
                found.add(ADAPTER.name, Verdict.OMISSION, Fault.TRUNCATED, message)
        return found

    def _base(self) -> Case:
        return self._bench.case(self._bench.space.base, self._registry)

    def _equal(self, cases: Iterable[tuple[str, Case]]) -> list[tuple[str, str]]:
        """Return the names of each two cases that have one key."""
        by_key: dict[bytes, list[str]] = {}
        for name, case in cases:
            by_key.setdefault(self._key(case), []).append(name)
        return [pair for names in by_key.values() for pair in itertools.combinations(names, 2)]

    # Fields whose ends a key may not see.

    def shifted(self) -> Found:
        """Try requests whose fields give one text when they are joined, though sharing is not allowed among them."""
        found = Found()
        count, equal = 0, []
        for what, a, b in self._shifted_cases():
            count += 2
            if self._key(a) == self._key(b):
                equal.append(what)
        found.trials.append(Trial("fields that join to one text", count, len(equal)))
        if equal:
            message = f"Requests of two tenants have one key: {equal[0]}" + (
                f", and {len(equal) - 1} such pairs more." if len(equal) > 1 else "."
            )
            found.pairs.append(Pair("one tenant", "another", equal[0], Verdict.OMISSION, True, share_allowed=False))
            found.add(SHARING_DOMAIN.name, Verdict.OMISSION, Fault.JOINED, message)
        return found

    def shifted_identities(self, dimension: str) -> Found:
        """Try identities of this dimension and another that give one text when they are joined.

        Content never has such identities, but labels and dimensions from outside may. A key that does not go by
        identities says nothing here.
        """
        found = Found()
        base = self._base()
        others = [other.name for other in self._registry if other.name != dimension]
        first, second, third = "s:left", "t:middle", "t:right"
        if dimension not in self._registry or self._same_key(base, {dimension: first}, {dimension: second}):
            return found
        count, equal = 0, []
        for other in others:
            for glue in _glues(other):
                count += 2
                long, rest = f"{first}{glue}{second}", f"{second}{glue}{third}"
                if self._same_key(base, {dimension: long, other: third}, {dimension: first, other: rest}):
                    equal.append((other, glue))
        found.trials.append(Trial("identities that join to one text", count, len(equal)))
        if equal:
            other, glue = equal[0]
            how = f"joined by {glue!r}" if glue else "joined without a separator"
            message = f"Different identities of {dimension} and {other} have one key when they are {how}."
            found.pairs.append(Pair("two identities", "two others", how, Verdict.OMISSION, True))
            found.add(dimension, Verdict.OMISSION, Fault.JOINED, message)
        return found

    def _same_key(self, base: Case, a: Mapping[str, str], b: Mapping[str, str]) -> bool:
        return self._key(_identified(base, a)) == self._key(_identified(base, b))

    def stand_ins(self, dimension: str) -> Found:
        """Try texts that code writes where there is no value."""
        found = Found()
        base = self._base()
        is_salt = dimension == SHARING_DOMAIN.name
        key = self._key(base)
        equal = []
        for text in STAND_INS:
            case = _with(base, self._secret, text if is_salt else None, None if is_salt else text)
            if self._key(case) == key:
                equal.append(text)
        found.trials.append(Trial("texts that stand for none", len(STAND_INS) + 1, len(equal)))
        if equal:
            what = "salt" if is_salt else "namespace"
            message = f"A request without a {what} has the key of one whose {what} is {equal[0]!r}."
            found.pairs.append(Pair("none", repr(equal[0]), "text for none", Verdict.OMISSION, True, None, False))
            found.add(dimension, Verdict.OMISSION, Fault.ABSENT, message)
        return found

    def _shifted_cases(self) -> Iterator[tuple[str, Case, Case]]:
        base = self._base()
        left, middle, right = "left", "middle", "right"

        def case(salt: str | None, namespace: str | None) -> Case:
            return _with(base, self._secret, salt=salt, namespace=namespace)

        for s in SEPARATORS:
            what = f"joined by {s!r}" if s else "joined without a separator"
            long, rest = f"{left}{s}{middle}", f"{middle}{s}{right}"
            yield f"salt and namespace {what}", case(long, right), case(left, rest)
            yield f"namespace and salt {what}", case(right, long), case(rest, left)
        yield "a salt alone and the same namespace alone", case(left, None), case(None, left)
        yield from self._shifted_folders(left, middle, right)
        yield from self._shifted_tokens(base)

    def _shifted_folders(self, left: str, middle: str, right: str) -> Iterator[tuple[str, Case, Case]]:
        base = self._bench.space.base
        content = [base[WEIGHTS.name]]
        if any(c.folder is not None for c in self._bench.space.candidates[ADAPTER.name]):
            content.append(self._adapter())
        for candidate in content:
            folder = self._scratch / "shifted" / candidate.dimension
            short = self._case_at(candidate, folder / left)
            for s in SEPARATORS:
                if s in ("/", "\0"):
                    continue
                what = f"name of the folder of {candidate.dimension}"
                how = f"joined by {s!r}" if s else "joined without a separator"
                a = _with(self._case_at(candidate, folder / f"{left}{s}{middle}"), self._secret, salt=right)
                b = _with(short, self._secret, salt=f"{middle}{s}{right}")
                yield f"{what} and salt {how}", a, b
                a = _with(self._case_at(candidate, folder / f"{middle}{s}{left}"), self._secret, salt=right)
                b = _with(short, self._secret, salt=f"{right}{s}{middle}")
                yield f"salt and {what} {how}", a, b

    def _shifted_tokens(self, base: Case) -> Iterator[tuple[str, Case, Case]]:
        tokens = base.tokens

        def case(prompt: tuple[int, ...], salt: str) -> Case:
            return _with(replace(base, tokens=prompt), self._secret, salt=salt)

        yield "digits of the last token and of the salt", case((*tokens, 12), "3x"), case((*tokens, 1), "23x")
        for s in SEPARATORS[1:]:
            yield f"tokens and salt joined by {s!r}", case((*tokens, 12), "x"), case(tokens, f"12{s}x")
        for width, order in itertools.product((2, 4, 8), ("little", "big")):
            # As bytes, a token below 128 is also the text of a salt.
            text = (12).to_bytes(width, "little" if order == "little" else "big").decode()
            yield f"{order}-endian tokens of {width} bytes and salt", case((*tokens, 12), "x"), case(tokens, f"{text}x")


def _glues(name: str) -> list[str]:
    """Return what code may write between two identities, of which the second is that of the dimension `name`."""
    separators = [s for s in SEPARATORS if s.isprintable() and not s.isspace()]
    return [*separators, *(f"{s}{name}{equals}" for s in separators for equals in (":", "="))]


def _identified(case: Case, identities: Mapping[str, str]) -> Case:
    """Return `case` with other identities of some dimensions, and everything else as it is."""
    worker, request = dict(case.descriptor.worker), dict(case.descriptor.request)
    for name, identity in identities.items():
        (worker if name in worker else request)[name] = Known(identity)
    return replace(case, descriptor=Descriptor(worker, request))


def _with(case: Case, secret: FleetSecret | None, salt: str | None = None, namespace: str | None = None) -> Case:
    """Return a case without salt and namespace as one that has these, and the provenance that belongs to them."""
    request: dict[str, Value] = dict(case.descriptor.request)
    if salt is not None and SHARING_DOMAIN.name in request:
        request[SHARING_DOMAIN.name] = sharing_domain(salt, secret)
    if namespace is not None and CLIENT_NAMESPACE.name in request:
        request[CLIENT_NAMESPACE.name] = client_namespace(namespace, secret)
    descriptor = Descriptor(case.descriptor.worker, request)
    return replace(case, salt=salt, namespace=namespace, descriptor=descriptor)


def _spread(items: Sequence[lora.Variant], most: int) -> Sequence[lora.Variant]:
    """Return at most `most` of the items, spread evenly, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
