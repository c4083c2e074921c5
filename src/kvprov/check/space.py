"""The configurations that a check compares: candidates for each dimension's value, of which one is the base."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvprov.check.errors import CheckError
from kvprov.contract.descriptor import check_identity
from kvprov.contract.dimension import Kind, check_name
from kvprov.contract.dimensions import (
    ADAPTER,
    BUILT_IN,
    CLIENT_NAMESPACE,
    KV_REPRESENTATION,
    MODEL_CONFIG,
    PRECISION,
    SHARING_DOMAIN,
    WEIGHTS,
)
from kvprov.contract.registry import Registry

PROMPT_TOKENS: Final = 64
ELEMENTS: Final = ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "float32")
LAYOUTS: Final = ("NHD", "HND")
SERIALIZATIONS: Final = ("raw", "safetensors")
QUANTIZATIONS: Final = ("fp8", "int8")


@dataclass(frozen=True, slots=True)
class Representation:
    """How a layer's state becomes the bytes of an entry.

    Attributes:
        element: Element type, one of `ELEMENTS`. What is beyond its range becomes its largest number.
        layout: `NHD`, tokens before heads, or `HND`, heads before tokens; keys before values in both.
        serialization: `raw`, the elements alone, or `safetensors`.
    """

    element: str
    layout: str = "NHD"
    serialization: str = "raw"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("element", self.element, ELEMENTS),
            ("layout", self.layout, LAYOUTS),
            ("serialization", self.serialization, SERIALIZATIONS),
        ):
            if value not in known:
                raise CheckError(f"{value!r:.80} is no {what} of an entry.", f"Known are: {', '.join(known)}.")

    def __str__(self) -> str:
        return f"{self.element}, {self.layout}" + ("" if self.serialization == "raw" else f", {self.serialization}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One value of one dimension.

    Attributes:
        dimension: Its name.
        name: What people call the value; of its own within the dimension.
        folder: Of `weights` and `adapter`: where the content is. An adapter without one is no adapter.
        quantization: Of `precision`: how the linear weights are quantized, one of `QUANTIZATIONS`, or None.
        config: Of `model_config`, and of any dimension from outside: fields of the model's configuration to replace.
        representation: Of `kv_representation`.
        text: Of `sharing_domain` and `client_namespace`: the salt or the namespace, or None.
        identity: Of a dimension from outside: the identity that its owner gives the value, or None for absent.
    """

    dimension: str
    name: str
    folder: Path | None = None
    quantization: str | None = None
    config: Mapping[str, object] = field(default_factory=dict, hash=False)
    representation: Representation | None = None
    text: str | None = None
    identity: str | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """What a check compares.

    Attributes:
        tokens: Token ids of the prompt.
        registry: The declared dimensions.
        candidates: Values of each dimension by its name; the first of each is the base.
        may_share: Pairs of values of a permission dimension that may share although they differ: its name, and the
            names of the two candidates in either order.
        notes: Why a dimension has no candidates, where that is known.
    """

    tokens: tuple[int, ...]
    registry: Registry
    candidates: Mapping[str, tuple[Candidate, ...]]
    may_share: frozenset[tuple[str, frozenset[str]]] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def base(self) -> dict[str, Candidate]:
        """The base value of each dimension that has one."""
        return {name: candidates[0] for name, candidates in self.candidates.items() if candidates}

    def pairs(self, dimension: str) -> Iterator[tuple[Candidate, Candidate]]:
        """Yield every two values of a dimension, once."""
        yield from itertools.combinations(self.candidates.get(dimension, ()), 2)

    def is_tested(self, dimension: str) -> bool:
        """Say whether a dimension has two values to compare."""
        return len(self.candidates.get(dimension, ())) > 1

    def share_allowed(self, a: Candidate, b: Candidate) -> bool:
        """Say whether requests of two values of one permission dimension may share: the oracle of C2."""
        return a == b or (a.dimension, frozenset({a.name, b.name})) in self.may_share


@dataclass(frozen=True, slots=True)
class SpaceFile:
    """What somebody adds to the space that kvprov makes of a model.

    Attributes:
        candidates: Further values, in their order.
        may_share: See `Space`.
        tokens: How many tokens the prompt has, or which.
        defaults: Whether kvprov's own candidates are compared as well.
    """

    candidates: tuple[Candidate, ...] = ()
    may_share: frozenset[tuple[str, frozenset[str]]] = frozenset()
    tokens: int | tuple[int, ...] = PROMPT_TOKENS
    defaults: bool = True


_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    WEIGHTS.name: ("folder",),
    PRECISION.name: ("quantization",),
    MODEL_CONFIG.name: ("config",),
    KV_REPRESENTATION.name: ("element", "layout", "serialization"),
    ADAPTER.name: ("folder",),
    SHARING_DOMAIN.name: ("salt",),
    CLIENT_NAMESPACE.name: ("namespace",),
}
_REQUIRED: Final = {
    WEIGHTS.name: "folder",
    PRECISION.name: "quantization",
    MODEL_CONFIG.name: "config",
    ADAPTER.name: "folder",
    SHARING_DOMAIN.name: "salt",
    CLIENT_NAMESPACE.name: "namespace",
}
_OUTSIDE: Final = ("identity", "config")


def load_space(path: str | Path) -> SpaceFile:
    """Read a space file, TOML or, with the suffix `.json`, JSON of the same members (see `docs/checking.md`).

    Folders are relative to the file.

    Raises:
        CheckError: The file cannot be read, or is not of that form.
    """
    path = Path(path)
    try:
        data = path.read_bytes().decode()
        loaded: object = json.loads(data) if path.suffix == ".json" else tomllib.loads(data)
    except OSError as error:
        raise CheckError(f"The space {path} cannot be read: {error.strerror or error}.", "Check the path.") from error
    except ValueError as error:
        form = "JSON" if path.suffix == ".json" else "TOML"
        raise CheckError(f"The space {path} is no {form}: {error}.", "See docs/checking.md for its form.") from error
    return _Reader(path).read(loaded)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _fail(self, where: str, why: str) -> CheckError:
        return CheckError(f"The space {self._path}: {where}: {why}.", "See docs/checking.md for its form.")

    def _members(self, value: object, where: str, known: Sequence[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._fail(where, "a table is expected")
        for name in value:
            if name not in known:
                raise self._fail(where, f"{name!r:.80} does not belong here, only {', '.join(known)}")
        return value

    def _list(self, value: object, where: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._fail(where, "a list is expected")
        return value

    def _text(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not value:
            raise self._fail(where, "a text is expected")
        return value

    def read(self, loaded: object) -> SpaceFile:
        members = self._members(loaded, "the file", ("tokens", "defaults", "candidates", "may_share"))
        defaults = members.get("defaults", True)
        if not isinstance(defaults, bool):
            raise self._fail("defaults", "true or false is expected")
        candidates = tuple(
            self._candidate(entry, f"candidates[{i}]")
            for i, entry in enumerate(self._list(members.get("candidates", []), "candidates"))
        )
        pairs = self._list(members.get("may_share", []), "may_share")
        may_share = frozenset(self._share(entry, f"may_share[{i}]") for i, entry in enumerate(pairs))
        return SpaceFile(candidates, may_share, self._tokens(members.get("tokens", PROMPT_TOKENS)), defaults)

    def _tokens(self, value: object) -> int | tuple[int, ...]:
        if isinstance(value, list) and len(value) > 1 and all(type(token) is int and token >= 0 for token in value):
            return tuple(value)
        if type(value) is int and value > 1:
            return value
        raise self._fail("tokens", "a number above 1 or a list of token ids is expected")

    def _share(self, entry: object, where: str) -> tuple[str, frozenset[str]]:
        members = self._members(entry, where, ("dimension", "names"))
        names = [self._text(name, f"{where}.names") for name in self._list(members.get("names"), f"{where}.names")]
        if len(names) != 2:
            raise self._fail(f"{where}.names", "two names of candidates are expected")
        return self._text(members.get("dimension"), f"{where}.dimension"), frozenset(names)

    def _candidate(self, entry: object, where: str) -> Candidate:
        dimension = self._text(entry.get("dimension") if isinstance(entry, dict) else None, f"{where}.dimension")
        check_name(dimension)
        fields = _FIELDS.get(dimension, _OUTSIDE)
        members = self._members(entry, where, ("dimension", "name", *fields))
        required = _REQUIRED.get(dimension)
        if required is not None and required not in members:
            raise self._fail(where, f"a candidate of {dimension} needs {required!r}")
        name = self._text(members["name"], f"{where}.name") if "name" in members else ""
        config = members.get("config", {})
        if not isinstance(config, dict):
            raise self._fail(f"{where}.config", "a table is expected")
        texts = {
            key: self._text(members[key], f"{where}.{key}") for key in fields if key != "config" and key in members
        }
        quantization = texts.get("quantization")
        if quantization is not None and quantization not in QUANTIZATIONS:
            raise self._fail(f"{where}.quantization", f"known are {', '.join(QUANTIZATIONS)}")
        identity = texts.get("identity")
        folder = texts.get("folder")
        text = texts.get("salt", texts.get("namespace"))
        representation = None
        if dimension == KV_REPRESENTATION.name:
            representation = Representation(
                texts.get("element", ELEMENTS[0]), texts.get("layout", "NHD"), texts.get("serialization", "raw")
            )
        shown = name or folder or quantization or text or identity or (str(representation) if representation else "")
        return Candidate(
            dimension,
            shown or json.dumps(config, sort_keys=True),
            folder=None if folder is None else (self._path.parent / folder).resolve(),
            quantization=quantization,
            config=config,
            representation=representation,
            text=text,
            identity=None if identity is None else check_identity(identity),
        )


def default_candidates(
    model: Path,
    *,
    weights: Sequence[tuple[str, Path]],
    adapters: Sequence[tuple[str, Path]],
    element: str,
    config: Mapping[str, Mapping[str, object]],
) -> dict[str, tuple[Candidate, ...]]:
    """Return kvprov's own candidates.

    Args:
        model: The checkpoint.
        weights: Other checkpoints of one shape, by name.
        adapters: Adapters, by name.
        element: Element type of the base entries.
        config: Fields of the configuration to replace, by name.
    """
    elements = [element, *(e for e in ("bfloat16", "float16", "fp8_e4m3") if e != element)]
    representations = [*(Representation(e) for e in elements), Representation(element, "HND")]
    texts = {"none": None, "X": "kvprov-check-x", "Y": "kvprov-check-y"}
    return {
        WEIGHTS.name: (
            Candidate(WEIGHTS.name, "as supplied", folder=model),
            *(Candidate(WEIGHTS.name, name, folder=folder) for name, folder in weights),
        ),
        PRECISION.name: (
            Candidate(PRECISION.name, "as supplied"),
            *(Candidate(PRECISION.name, f"{q} per channel", quantization=q) for q in QUANTIZATIONS),
        ),
        MODEL_CONFIG.name: (
            Candidate(MODEL_CONFIG.name, "as supplied"),
            *(Candidate(MODEL_CONFIG.name, name, config=fields) for name, fields in config.items()),
        ),
        KV_REPRESENTATION.name: tuple(
            Candidate(KV_REPRESENTATION.name, str(r), representation=r) for r in representations
        ),
        ADAPTER.name: (
            Candidate(ADAPTER.name, "none"),
            *(Candidate(ADAPTER.name, name, folder=folder) for name, folder in adapters),
        ),
        SHARING_DOMAIN.name: tuple(Candidate(SHARING_DOMAIN.name, name, text=t) for name, t in texts.items()),
        CLIENT_NAMESPACE.name: tuple(Candidate(CLIENT_NAMESPACE.name, name, text=t) for name, t in texts.items()),
    }


def combine(
    tokens: tuple[int, ...],
    registry: Registry,
    defaults: Mapping[str, tuple[Candidate, ...]],
    added: SpaceFile,
    notes: Mapping[str, str],
) -> Space:
    """Return the space of kvprov's own candidates and those that somebody added.

    The base of every dimension is kvprov's own first candidate; of a dimension from outside, its absence.

    Raises:
        CheckError: A dimension is not registered, two of its candidates have one name, or a pair that may share names
            no candidates of a permission dimension.
    """
    candidates: dict[str, tuple[Candidate, ...]] = {}
    for dimension in registry:
        own = defaults.get(dimension.name, ())
        more = tuple(c for c in added.candidates if c.dimension == dimension.name)
        if dimension.name not in BUILT_IN:
            own = (Candidate(dimension.name, "absent"),)
        chosen = (own if added.defaults else own[:1]) + more
        # A base alone compares nothing, but every configuration needs it.
        candidates[dimension.name] = chosen
        names = [candidate.name for candidate in chosen]
        for name in names:
            if names.count(name) > 1:
                raise CheckError(
                    f"Two candidates of {dimension.name} are named {name!r:.80}.", "Give one of them another name."
                )
    for candidate in added.candidates:
        if candidate.dimension not in registry:
            raise CheckError(
                f"The space has a candidate of {candidate.dimension!r}, which is not registered.",
                f"Registered are: {', '.join(d.name for d in registry)}. Install the package that declares it.",
            )
    for name, pair in added.may_share:
        known = {candidate.name for candidate in candidates.get(name, ())}
        if name not in registry or registry[name].kind is not Kind.PERMISSION or not pair <= known or len(pair) != 2:
            raise CheckError(
                f"may_share names {', '.join(sorted(pair))} of {name!r}, which are no two candidates of a permission "
                "dimension.",
                "Name two candidates as the report does.",
            )
    return Space(tokens, registry, candidates, added.may_share, notes)
