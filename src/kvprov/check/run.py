"""The offline check: one model, configurations that differ in one dimension, and a key function."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import kvprov
from kvprov.check import lora, results
from kvprov.check.bench import Bench, Values
from kvprov.check.case import Case
from kvprov.check.child import importable_name, keys_elsewhere
from kvprov.check.errors import CheckError
from kvprov.check.fields import ROTARY_BASE, WINDOW
from kvprov.check.keys import BOUND, KeyFunction, evaluate, key_function
from kvprov.check.prefill import Model
from kvprov.check.results import VALUES, Control, Judged, Pair, Report
from kvprov.check.space import (
    ELEMENTS,
    Candidate,
    Space,
    SpaceFile,
    combine,
    default_candidates,
    load_space,
)
from kvprov.check.steps import SilentSteps, Steps
from kvprov.check.stored import store
from kvprov.check.trials import Found, Trials
from kvprov.check.verdicts import Fault, Finding, Verdict, judge
from kvprov.check.weights import perturb
from kvprov.contract.dimension import Dimension, Kind
from kvprov.contract.dimensions import ADAPTER, CLIENT_NAMESPACE, SHARING_DOMAIN, WEIGHTS
from kvprov.contract.key import DigestBits
from kvprov.contract.registry import Registry
from kvprov.extensions import load_extensions, registry_with
from kvprov.identity.checkpoint import resolve_folder
from kvprov.identity.digest_cache import DigestCache
from kvprov.identity.domain import FleetSecret
from kvprov.identity.dtypes import canonical_dtype

SEED: Final = 1
"""Of what is generated where nothing is supplied, so that every run compares the same."""

EVERY: Final = "every dimension"
"""What findings name that are about all dimensions alike."""


class Checker(AbstractContextManager["Checker"]):
    """Compares one model's configurations, for as many key functions as are asked about. A context manager.

    State is computed when it is first needed, and kept: a second key function costs little.

    Args:
        model: A checkpoint in safetensors, or a Hugging Face hub id whose main revision is in the local cache.
        adapters: Folders of LoRA adapters of the model. Without any, two are generated.
        weights: Folders of other checkpoints of the same shape. Without any, the model's weights are perturbed.
        space: A space file, or what one holds.
        registry: The declared dimensions; by default, those of kvprov and of installed packages.
        secret: The fleet's secret, for salts.
        bits: How much of a digest enters keys.
        withhold: Dimensions that are left out of every key.
        cache: Where digests of checkpoint files are remembered; by default they are not.
        steps: What is told what is being compared.

    Raises:
        MissingPackageError: torch or transformers is not installed.
        CheckError: The model or the space cannot be used.
        KvprovError: Content has no identity.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Sequence[str | Path] = (),
        weights: Sequence[str | Path] = (),
        space: str | Path | SpaceFile | None = None,
        registry: Registry | None = None,
        secret: FleetSecret | None = None,
        bits: DigestBits = DigestBits.FULL,
        withhold: Sequence[str] = (),
        cache: DigestCache | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._began = time.monotonic()
        self.name = str(model)
        self._secret = secret
        self._withheld = tuple(withhold)
        self._steps = steps or SilentSteps()
        registry = registry_with(load_extensions()) if registry is None else registry
        registry.withhold(*self._withheld)
        added = space if isinstance(space, SpaceFile) else SpaceFile() if space is None else load_space(space)
        self._model = Model(resolve_folder(model))
        self._scratch = tempfile.TemporaryDirectory(prefix="kvprov-check-")
        try:
            self.space = self._space(registry, added, _named(adapters), _named(weights))
            self._bench = Bench(self._model, self.space, secret, bits, cache)
        except BaseException:
            self._scratch.cleanup()
            raise
        self._repeats: bool | None = None
        self._judged = 0

    def close(self) -> None:
        """Remove what was written for the check."""
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The space.

    @property
    def _folder(self) -> Path:
        return Path(self._scratch.name)

    def _space(
        self,
        registry: Registry,
        added: SpaceFile,
        adapters: list[tuple[str, Path]],
        weights: list[tuple[str, Path]],
    ) -> Space:
        model = self._model
        tokens = added.tokens if isinstance(added.tokens, tuple) else _prompt(model, added.tokens)
        if max(tokens) >= model.vocabulary:
            raise CheckError(
                f"The space's prompt has the token {max(tokens)}, but the model knows {model.vocabulary}.",
                "Name tokens that the model knows.",
            )
        notes = {}
        of = {candidate.dimension for candidate in added.candidates}
        if added.defaults and not weights:
            at = self._folder / "perturbed" / f"{model.folder.name}-perturbed"
            weights = [("perturbed", perturb(model.folder, at, SEED))]
        if added.defaults and not adapters and ADAPTER.name not in of:
            modules = lora.targets(model.folder)
            for name, seed in (("A", SEED), ("B", SEED + 1)) if modules else ():
                folder = self._folder / "generated" / f"adapter-{name.lower()}"
                lora.write_adapter(lora.generate(modules, seed), folder)
                adapters.append((f"generated {name}", folder))
            if not modules:
                notes[ADAPTER.name] = "No adapter was supplied, and none can be generated for this model."
        window = max(2, len(tokens) // 4)
        config: dict[str, Mapping[str, object]] = {f"sliding window of {window} tokens": {WINDOW: window}}
        if model.rotary_base is not None:
            config = {"rotary base doubled": {ROTARY_BASE: 2 * model.rotary_base}, **config}
        element = canonical_dtype(model.dtype)
        defaults = default_candidates(
            model.folder,
            weights=weights,
            adapters=adapters,
            element=element if element in ELEMENTS else ELEMENTS[0],
            config=config,
        )
        return combine(tokens, registry, defaults, added, notes)

    # Judging.

    def judge(self, key: str | KeyFunction = BOUND, *, withhold: Sequence[str] = (), thorough: bool = True) -> Report:
        """Judge one key function.

        Args:
            key: `bound`, `content-only`, the name of a function to import, or a function.
            withhold: Dimensions that are left out of what kvprov binds.
            thorough: Whether trials are made beside the values of the space: other paths and processes, variants of
                an adapter, many salts, fields that join to one text.

        Raises:
            CheckError: The key function cannot be found or fails, or the model cannot be run.
            ContractError: A dimension to withhold is not registered.
            KvprovError: Content has no identity.
        """
        began, self._began = self._began, time.monotonic()
        function = key_function(key) if isinstance(key, str) else key
        withheld = tuple(dict.fromkeys((*self._withheld, *withhold)))
        registry = self.space.registry.withhold(*withheld)
        self._judged += 1
        scratch = self._folder / f"key-{self._judged}"
        judging = _Judging(self._bench, registry, function, self._secret, scratch, self._steps, thorough)
        self._steps.start(judging.count)
        try:
            control = self._control(judging)
            if not control.state:
                dimensions = judging.nothing("Two runs of one configuration gave other bytes.")
            elif not control.key:
                dimensions = judging.never_shares()
            else:
                dimensions = judging.dimensions()
                if thorough:
                    control, dimensions = judging.elsewhere(control, dimensions, key)
        finally:
            self._steps.stop()
        findings: tuple[Finding, ...] = ()
        if not control.key:
            message = "One configuration has another key each time, so nothing is ever shared, and nothing is proven."
            findings = (Finding(EVERY, Verdict.OVER_SEPARATED, Fault.NEVER_SHARES, message),)
        return Report(
            model=self.name,
            tokens=len(self.space.tokens),
            layers=len(self._bench.state(self.space.base).layers),
            key=key if isinstance(key, str) else getattr(key, "__qualname__", repr(key)),
            withheld=withheld,
            control=control,
            dimensions=tuple(replace(d, withheld=d.dimension.name in withheld) for d in dimensions),
            findings=findings,
            seconds=time.monotonic() - began,
            versions=_versions(),
        )

    def leave_one_out(self) -> dict[str, dict[str, Verdict]]:
        """Return the verdicts of kvprov's own key with each tested dimension left out in turn, by that dimension."""
        found = {}
        for dimension in self.space.registry:
            if self.space.is_tested(dimension.name) and dimension.name not in self._withheld:
                found[dimension.name] = self.judge(BOUND, withhold=[dimension.name], thorough=False).verdicts
        return found

    def _control(self, judging: _Judging) -> Control:
        base = self.space.base
        self._steps.step("one configuration, twice")
        if self._repeats is None:
            representation = self._bench.representation(base)
            again = store(self._bench.fresh_state(base), representation)
            self._repeats = store(self._bench.state(base), representation).layers == again.layers
        return Control(self._repeats, judging.key(base) == judging.key(base))


class _Judging:
    """One key function's judgement in the making."""

    def __init__(
        self,
        bench: Bench,
        registry: Registry,
        function: KeyFunction,
        secret: FleetSecret | None,
        scratch: Path,
        steps: Steps,
        thorough: bool,
    ) -> None:
        self._bench = bench
        self._space = bench.space
        self._registry = registry
        self._function = function
        self._steps = steps
        self._thorough = thorough
        self._trials = Trials(bench, registry, self.key_of, secret, scratch)
        self._cases: dict[tuple[str, str], Case] = {}
        self._keys: dict[tuple[str, str], bytes] = {}

    @property
    def count(self) -> int:
        """How many steps there are."""
        tested = [d.name for d in self._space.registry if self._space.is_tested(d.name)]
        pairs = sum(len(list(self._space.pairs(name))) for name in tested)
        trials = sum(len(self._trials_of(name)) for name in tested) + 1 if self._thorough else 0
        return 1 + pairs + trials

    def key_of(self, case: Case) -> bytes:
        """Return the key of a case."""
        return evaluate(self._function, case)

    def key(self, values: Values) -> bytes:
        """Return the key of a configuration, derived anew."""
        return self.key_of(self._bench.case(values, self._registry))

    def nothing(self, note: str) -> list[Judged]:
        """Return every dimension, untested."""
        return [Judged(dimension, note=note) for dimension in self._space.registry]

    def never_shares(self) -> list[Judged]:
        """Return the dimensions for a key function that gives one configuration another key each time."""
        pair = Pair("one configuration", "the same", results.REPEATED, Verdict.OVER_SEPARATED, False)
        return [
            Judged(d, pairs=(pair,)) if self._space.is_tested(d.name) else self._untested(d)
            for d in self._space.registry
        ]

    def _untested(self, dimension: Dimension) -> Judged:
        note = self._space.notes.get(dimension.name, "The space has no two values of it.")
        return Judged(dimension, note=note)

    def dimensions(self) -> list[Judged]:
        """Judge each dimension."""
        return [
            self._dimension(dimension) if self._space.is_tested(dimension.name) else self._untested(dimension)
            for dimension in self._space.registry
        ]

    def _values(self, candidate: Candidate) -> Values:
        return {**self._space.base, candidate.dimension: candidate}

    def _key_of_candidate(self, candidate: Candidate) -> bytes:
        at = (candidate.dimension, candidate.name)
        if at not in self._keys:
            self._cases[at] = self._bench.case(self._values(candidate), self._registry)
            self._keys[at] = self.key_of(self._cases[at])
        return self._keys[at]

    def _dimension(self, dimension: Dimension) -> Judged:
        pairs = []
        for a, b in self._space.pairs(dimension.name):
            self._steps.step(f"{dimension.name}: {a.name}, {b.name}")
            pairs.append(self._pair(dimension, a, b))
        findings = _of_values(dimension, pairs)
        judged = Judged(dimension, pairs=tuple(pairs), findings=tuple(findings))
        if not self._thorough:
            return judged
        for what, trial in self._trials_of(dimension.name).items():
            self._steps.step(f"{dimension.name}: {what}")
            # What is omitted anyway proves nothing about where else it would be lost.
            if judged.verdict is not Verdict.OMISSION:
                found = trial()
                judged = replace(
                    judged,
                    pairs=(*judged.pairs, *found.pairs),
                    trials=(*judged.trials, *found.trials),
                    findings=(*judged.findings, *found.findings),
                )
        return judged

    def _trials_of(self, dimension: str) -> dict[str, Callable[[], Found]]:
        trials = self._trials
        made: dict[str, Callable[[], Found]] = {}
        has_folders = any(c.folder is not None for c in self._space.candidates[dimension])
        if dimension in (WEIGHTS.name, ADAPTER.name) and has_folders:
            made["at other paths"] = lambda: trials.places(dimension)
        if dimension == ADAPTER.name and has_folders:
            made |= {"changed in one place": trials.variants, "many adapters": trials.many_adapters}
        if dimension == SHARING_DOMAIN.name:
            made |= {"many salts": trials.many_salts, "joined fields": trials.shifted}
        if dimension in (SHARING_DOMAIN.name, CLIENT_NAMESPACE.name):
            made["texts for none"] = lambda: trials.stand_ins(dimension)
        return made | {"joined identities": lambda: trials.shifted_identities(dimension)}

    def _pair(self, dimension: Dimension, a: Candidate, b: Candidate) -> Pair:
        same_key = self._key_of_candidate(a) == self._key_of_candidate(b)
        if dimension.kind is Kind.PERMISSION:
            allowed = self._space.share_allowed(a, b)
            return Pair(a.name, b.name, VALUES, judge(not allowed, same_key), same_key, share_allowed=allowed)
        difference = self._bench.difference(self._values(a), self._values(b))
        return Pair(a.name, b.name, VALUES, judge(not difference.equal, same_key), same_key, difference)

    def elsewhere(
        self, control: Control, dimensions: list[Judged], key: str | KeyFunction
    ) -> tuple[Control, list[Judged]]:
        """Ask another process for the key of every value, and add what it says.

        Args:
            control: The control so far.
            dimensions: What was found so far.
            key: The key function, or its name.

        Raises:
            CheckError: The key function was given by name, and fails there.
        """
        self._steps.step("keys in another process")
        name = key if isinstance(key, str) else importable_name(key)
        if name is None:
            return replace(control, note="Another process cannot import the key function."), dimensions
        places = list(self._cases)
        base = self._bench.case(self._space.base, self._registry)
        own = [self.key_of(base), *self._keys.values()]
        try:
            found = keys_elsewhere(name, [base, *self._cases.values()])
        except CheckError as error:
            if isinstance(key, str):
                raise
            # A function of a test may need what only the test's process has.
            return replace(control, note=error.message), dimensions
        same = {place: mine == theirs for place, mine, theirs in zip(places, own[1:], found[1:], strict=True)}
        control = replace(control, process=own[0] == found[0])
        return control, [self._with_process(judged, same) for judged in dimensions]

    @staticmethod
    def _with_process(judged: Judged, same: Mapping[tuple[str, str], bool]) -> Judged:
        name = judged.dimension.name
        agreed = {value: equal for (dimension, value), equal in same.items() if dimension == name}
        pairs = tuple(Pair(v, v, results.PROCESS, judge(False, equal), equal) for v, equal in agreed.items())
        others = [value for value, equal in agreed.items() if not equal]
        findings = judged.findings
        if others:
            message = f"{name}: {others[0]} has another key in another process" + (
                f", as have {len(others) - 1} other values." if others[1:] else "."
            )
            findings = (*findings, Finding(name, Verdict.OVER_SEPARATED, Fault.PROCESS, message))
        return replace(judged, pairs=judged.pairs + pairs, findings=findings)


def _of_values(dimension: Dimension, pairs: Sequence[Pair]) -> list[Finding]:
    """Return what the pairs of a dimension's values say is wrong, in a sentence for each verdict."""
    findings = []
    omitted = [pair for pair in pairs if pair.verdict is Verdict.OMISSION]
    if omitted:
        pair = Judged(dimension, pairs=tuple(omitted)).worst or omitted[0]
        why = "sharing is not allowed" if pair.difference is None else _in_words(pair)
        message = f"{pair.a} and {pair.b} have one key, and {why}."
        if len(omitted) > 1:
            message += f" So it is with {len(omitted)} of {len(pairs)} pairs."
        findings.append(Finding(dimension.name, Verdict.OMISSION, Fault.NOT_BOUND, message))
    separated = [pair for pair in pairs if pair.verdict is Verdict.OVER_SEPARATED]
    if separated:
        pair = separated[0]
        message = f"{pair.a} and {pair.b} have different keys, though they may share and store the same bytes."
        findings.append(Finding(dimension.name, Verdict.OVER_SEPARATED, Fault.NEEDLESS, message))
    return findings


def _in_words(pair: Pair) -> str:
    difference = pair.difference
    assert difference is not None
    if difference.place is None:
        return "neither can read what the other stores"
    place = difference.place
    return (
        f"their state differs by up to {difference.largest:.3g} "
        f"(layer {place.layer}, head {place.head}, token {place.token}) in {difference.tokens} tokens"
    )


def _named(folders: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Return folders with names of their own: the last part of the path, or all of it where two have one last part."""
    paths = [Path(folder).resolve() for folder in folders]
    lasts = [path.name for path in paths]
    return [(path.name if lasts.count(path.name) == 1 else str(path), path) for path in paths]


def _prompt(model: Model, count: int) -> tuple[int, ...]:
    """Return a prompt of random tokens, the same for one vocabulary and length."""
    source = random.Random(SEED)
    usable = model.vocabulary - 1
    special = model.special_tokens
    tokens: list[int] = []
    while len(tokens) < count:
        token = source.randint(0, usable)
        if token not in special:
            tokens.append(token)
    return tuple(tokens)


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"kvprov": kvprov.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def check(
    model: str | Path,
    key: str | KeyFunction = BOUND,
    *,
    adapters: Sequence[str | Path] = (),
    weights: Sequence[str | Path] = (),
    space: str | Path | SpaceFile | None = None,
    withhold: Sequence[str] = (),
) -> Report:
    """Judge one key function on one model. See `Checker` and `Checker.judge`, which several are asked with.

    Raises:
        KvprovError: See there.
    """
    with Checker(model, adapters=adapters, weights=weights, space=space, withhold=withhold) as checker:
        return checker.judge(key)
