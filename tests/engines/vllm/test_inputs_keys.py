"""Identities of media and keys of prompt embeddings: each fact alone, and what a client may forge.

The first part plays vLLM's classes by a few lines. The second makes real requests in real engines, with the tiny model,
which takes no media: what is compared is the keys that the live engine's own code makes of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from kvprov.engines.vllm import inputs
from tests.support.engine import Engine, Launch
from tests.support.inputs import Ask, made
from tests.support.models import BLOCK, Models
from tests.support.processes import Processes


@dataclass(frozen=True)
class Place:
    offset: int = 3
    length: int = 4
    is_embed: Any = None


class Item(dict[str, Any]):
    """As vLLM's, a mapping that takes attributes."""


class Batched:
    pass


class Flat:
    pass


@dataclass(frozen=True)
class Feature:
    data: Any
    modality: str = "image"
    identifier: str = "chosen-by-the-client"
    mm_position: Place = field(default_factory=Place)


def item(kind: type = Batched, **data: Any) -> Item:
    return Item({name: SimpleNamespace(data=value, field=kind()) for name, value in data.items()})


def request(*features: Feature, lora: object = None) -> Any:
    return SimpleNamespace(mm_features=list(features), lora_request=lora)


def names(*features: Feature) -> list[str]:
    asked = request(*features)
    assert inputs.bind(asked, WORKER, adapter_shapes_media=False) == ""
    return [feature.identifier for feature in asked.mm_features]


def pixels(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


WORKER = bytes(32)
BASE = Feature(item(pixel_values=pixels(), grid=torch.tensor([1, 2])))

OTHERS: dict[str, Feature] = {
    "data": replace(BASE, data=item(pixel_values=pixels(1), grid=torch.tensor([1, 2]))),
    "dtype": replace(BASE, data=item(pixel_values=pixels().view(torch.float16), grid=torch.tensor([1, 2]))),
    "shape": replace(BASE, data=item(pixel_values=pixels().reshape(4, 3), grid=torch.tensor([1, 2]))),
    "name": replace(BASE, data=item(pixel_value=pixels(), grid=torch.tensor([1, 2]))),
    "missing": replace(BASE, data=item(pixel_values=pixels())),
    "kind": replace(BASE, data=item(Flat, pixel_values=pixels(), grid=torch.tensor([1, 2]))),
    "modality": replace(BASE, modality="video"),
    "length": replace(BASE, mm_position=Place(length=5)),
    "mask": replace(BASE, mm_position=Place(is_embed=torch.tensor([True, False, True, True]))),
    "list": replace(BASE, data=item(pixel_values=[pixels()], grid=torch.tensor([1, 2]))),
    "array": replace(BASE, data=item(pixel_values=pixels().float().numpy(), grid=torch.tensor([1, 2]))),
}


def test_equal_content_has_one_name_whatever_the_client_calls_it() -> None:
    again = Feature(
        item(grid=torch.tensor([1, 2]), pixel_values=pixels().t().contiguous().t()),
        identifier="another",
        mm_position=Place(offset=90),
    )
    (first,), (second,) = names(BASE), names(again)
    assert first == second
    assert len(bytes.fromhex(first)) == 32
    assert names(replace(BASE, data=item(n=numpy.arange(3)))) == names(replace(BASE, data=item(n=numpy.arange(3))))


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_each_fact_alone_gives_another_name(name: str) -> None:
    assert names(BASE) != names(OTHERS[name])


VALUES: dict[str, Any] = {
    "none": None,
    "false": False,
    "zero": 0,
    "zero point": 0.0,
    "minus zero": -0.0,
    "text": "0",
    "bytes": b"0",
    "empty": "",
    "list": [],
    "nested": [[]],
    "pair": [0, 0],
    "mapping": {},
    "named": {"0": 0},
    "tensor": torch.zeros(()),
    "row": torch.zeros(1),
    "array": numpy.zeros(1, dtype="float32"),
    "no rows": torch.zeros(0, 3),
    "no columns": torch.zeros(3, 0),
    "surrogate": "\ud800",
}


def test_values_of_all_kinds_have_names_of_their_own() -> None:
    found = {name: names(Feature(item(value=value)))[0] for name, value in VALUES.items()}
    assert len(set(found.values())) == len(VALUES)
    assert names(Feature(item(value=VALUES["named"])))[0] == found["named"]


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    return value


UNKNOWN: dict[str, Callable[[], Any]] = {
    "no data": lambda: None,
    "in shared memory": lambda: item(address=5, monotonic_id=1, signature=[1]),
    "an object": lambda: item(value=object()),
    "an array of objects": lambda: item(value=numpy.array([object()])),
    "sparse": lambda: item(value=torch.eye(2).to_sparse()),
    "meta": lambda: item(value=torch.empty(2, device="meta")),
    "conjugated": lambda: item(value=torch.tensor([1j]).conj()),
    "deep": lambda: item(value=deep()),
    "named by numbers": lambda: item(value={1: 2}),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_content_that_is_not_known_is_never_shared(name: str) -> None:
    one, other = (request(BASE, Feature(UNKNOWN[name](), identifier="same")) for _ in range(2))
    reasons = [inputs.bind(asked, WORKER, adapter_shapes_media=False) for asked in (one, other)]
    assert all(reason.startswith("media: ") for reason in reasons)
    (known, first), (known_too, second) = ([f.identifier for f in asked.mm_features] for asked in (one, other))
    assert known == known_too == names(BASE)[0]
    assert first != second
    assert len(bytes.fromhex(first)) == 32
    # Its name is its own for as long as the request lives.
    assert inputs.bind(one, WORKER, adapter_shapes_media=False) == reasons[0]
    assert one.mm_features[1].identifier == first


def test_media_that_an_adapter_shapes_are_not_shared() -> None:
    """vLLM keeps what the encoder gave under the adapter's name, which outlives its bytes."""
    asked = request(BASE, lora=SimpleNamespace(lora_name="a"))
    assert inputs.bind(asked, WORKER, adapter_shapes_media=True).startswith("media: adapters apply")
    assert asked.mm_features[0].identifier != names(BASE)[0]
    plain = request(BASE)
    assert inputs.bind(plain, WORKER, adapter_shapes_media=True) == ""
    assert plain.mm_features[0].identifier == names(BASE)[0]
    assert inputs.bind(request(lora=SimpleNamespace(lora_name="a")), WORKER, adapter_shapes_media=True) == ""


# In real engines.


@dataclass(frozen=True)
class Keys:
    """What a live engine makes of it."""

    chain: tuple[str, ...]
    identifiers: tuple[str, ...]
    folder: str
    reason: str


def keys_of(engine: Engine, *, asks: dict[str, Ask]) -> dict[str, Keys]:
    connector = engine.core.scheduler.connector
    binding = getattr(engine.core, "_kvprov_binding", None)
    native, asked = connector._generate_foldername_debug, []
    connector._generate_foldername_debug = lambda *a, **k: asked.append(Path(native(*a, **k)).name) or native(*a, **k)
    found = {}
    for name, ask in asks.items():
        request = made(engine, name, ask)
        if binding is not None:
            binding.admit(request, list)
        asked.clear()
        if ask.embeds is None:
            connector.get_num_new_matched_tokens(request, 0)
        found[name] = Keys(
            tuple(block.hex() for block in request.block_hashes),
            tuple(feature.identifier for feature in request.mm_features),
            "".join(asked),
            connector.reason_to_bypass(request) if hasattr(connector, "reason_to_bypass") else "",
        )
    return found


def bypassed(engine: Engine) -> dict[str, int]:
    """Return how many requests bypass the tier, by kind of reason."""
    binding = getattr(engine.core, "_kvprov_binding", None)
    return {} if binding is None else dict(binding.bypasses.counts)


def client_identifiers(_engine: Engine) -> dict[str, list[str]]:
    """Return what vLLM's own code makes of two images with and without an identifier of the client's choice."""
    from PIL import Image
    from vllm.multimodal.parse import MultiModalDataParser
    from vllm.multimodal.processing.inputs import ProcessorInputs

    def hashes(color: int, name: str | None, model: str = "/models/a") -> str:
        items = MultiModalDataParser().parse_mm_data({"image": [Image.new("L", (4, 4), color)]})
        given = ProcessorInputs([1], items, None if name is None else {"image": [name]})
        return given.get_mm_hashes(model, "blake3")["image"][0]

    return {
        "chosen": [hashes(1, "chosen"), hashes(2, "chosen")],
        "content": [hashes(1, None), hashes(1, None), hashes(2, None)],
        "paths": [hashes(1, None), hashes(1, None, "/mnt/a")],
    }


TEXT = (*range(1, 97), 5, 5)
"""Three blocks, of tokens whose bytes are text, and what the connector never looks up."""
BYTES = b"".join(token.to_bytes(8, "little") for token in TEXT[2 * BLOCK : 3 * BLOCK]).decode()
"""The third block as a client could write it into an identifier."""
ROWS = torch.randn(3 * BLOCK, 64, generator=torch.Generator().manual_seed(3))
NOUGHT = torch.zeros_like(ROWS).to(torch.bfloat16)


def mask(*embedded: int) -> tuple[bool, ...]:
    return tuple(i not in embedded for i in range(3 * BLOCK))


ASKS = {
    "text": Ask(TEXT),
    "text again": Ask(TEXT),
    "image": Ask(TEXT, (("chosen", 1, 40),)),
    "renamed": Ask(TEXT, (("other", 1, 40),)),
    "other image": Ask(TEXT, (("chosen", 2, 40),)),
    "moved": Ask(TEXT, (("chosen", 1, 41),)),
    "withheld": Ask(TEXT, (("chosen", None, 40),)),
    "withheld again": Ask(TEXT, (("chosen", None, 40),)),
    "two": Ask(TEXT, (("a", 1, 40), ("b", 2, 50))),
    "two as one": Ask(TEXT, (("a-b", 1, 40),)),
    "two swapped": Ask(TEXT, (("b", 2, 40), ("a", 1, 50))),
    "tokens as a name": Ask(TEXT[: 2 * BLOCK + 2], ((BYTES, 1, 40),)),
    "salted": Ask(TEXT, (("chosen", 1, 40),), salt="victim"),
    "rows": Ask(None, embeds=ROWS.to(torch.bfloat16)),
    "rows again": Ask(None, embeds=ROWS.to(torch.bfloat16)),
    "rows of another type": Ask(None, embeds=ROWS.to(torch.bfloat16).view(torch.float16)),
    "other rows": Ask(None, embeds=-ROWS.to(torch.bfloat16)),
    "mixed": Ask((0,) * 96, embeds=NOUGHT, mask=mask(3, 4)),
    "mixed elsewhere": Ask((0,) * 96, embeds=NOUGHT, mask=mask(3, 5)),
    "mixed later": Ask((0,) * 96, embeds=NOUGHT, mask=mask(3, 4, 70)),
}


@pytest.fixture(scope="module")
def keys(processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stores")
    launches = [Launch(models.base, folder, mode) for mode in ("off", "enforce")]
    first = processes.run_all(
        [(launch, [partial(keys_of, asks=ASKS), client_identifiers, bypassed]) for launch in launches]
    )
    runs = {}
    for mode, run in zip(("off", "enforce"), first, strict=True):
        if isinstance(run, Exception):
            raise run
        runs[mode] = tuple(run.results)
    return runs


SAME = (("text", "text again"), ("image", "renamed", "two as one"), ("rows", "rows again"))
MEET_IN_STOCK = (
    ("image", "other image"),
    ("image", "withheld"),
    ("withheld", "withheld again"),
    ("rows", "rows of another type"),
    ("mixed", "mixed elsewhere"),
    ("mixed", "mixed later"),
)
"""Different inputs to which stock gives equal hashes of all blocks."""


@pytest.mark.engine
def test_a_client_chooses_identifiers_in_stock(keys: dict[str, Any]) -> None:
    """The control: what these tests are about is so, in vLLM's own code."""
    said = keys["off"][1]
    assert said["chosen"] == ["chosen", "chosen"]
    assert said["content"][0] == said["content"][1] != said["content"][2]
    # Two workers that mount one model at two paths do not share images.
    assert said["paths"][0] != said["paths"][1]
    stock = keys["off"][0]
    for one, other in MEET_IN_STOCK:
        assert stock[one].chain == stock[other].chain, (one, other)
    assert stock["image"].folder == stock["other image"].folder
    assert stock["two"].folder == stock["two as one"].folder
    assert stock["tokens as a name"].folder == stock["text"].folder
    assert stock["image"].chain != stock["renamed"].chain


@pytest.mark.engine
def test_equal_content_has_equal_keys(keys: dict[str, Any]) -> None:
    bound = keys["enforce"][0]
    assert all(len(found.chain) == 3 for name, found in bound.items() if name != "tokens as a name")
    for first, *others in SAME:
        assert all(bound[first] == bound[other] for other in others), first


@pytest.mark.engine
def test_different_content_never_meets(keys: dict[str, Any]) -> None:
    bound = keys["enforce"][0]
    for one, other in MEET_IN_STOCK:
        assert bound[one].chain[-1] != bound[other].chain[-1], (one, other)
    unlike = [(a, b) for a in bound for b in bound if a < b and not any({a, b} <= set(group) for group in SAME)]
    for one, other in unlike:
        assert bound[one].chain[-1] != bound[other].chain[-1], (one, other)
        if bound[one].folder and bound[other].folder:
            assert bound[one].folder != bound[other].folder, (one, other)
    # What comes before an image does not depend on it.
    assert bound["image"].chain[0] == bound["other image"].chain[0] == bound["withheld"].chain[0]
    assert bound["mixed"].chain[:2] == bound["mixed later"].chain[:2]


@pytest.mark.engine
def test_what_is_not_known_bypasses(keys: dict[str, Any]) -> None:
    bound = keys["enforce"][0]
    reasons = {name: found.reason.split(":")[0] for name, found in bound.items() if found.reason}
    embedded = {name: "prompt embeddings" for name, ask in ASKS.items() if ask.embeds is not None}
    assert reasons == {"withheld": "media", "withheld again": "media"} | embedded
    assert keys["enforce"][2] == {"media": 2, "prompt embeddings": len(embedded)}
    # No store is asked for them, either.
    assert {name for name, found in bound.items() if not found.folder} == set(reasons)


@pytest.mark.engine
def test_no_identifier_of_a_client_reaches_a_key(keys: dict[str, Any]) -> None:
    """So none can stand for another provenance: one that says `kvprov:DIGEST` is gone like any other."""
    bound = keys["enforce"][0]
    given = {identifier for ask in ASKS.values() for identifier, _, _ in ask.media}
    left = {identifier for found in bound.values() for identifier in found.identifiers}
    assert given
    assert left
    assert not given & left
    assert all(len(bytes.fromhex(identifier)) == 32 for identifier in left)


def forged(engine: Engine, *, salt: str, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Ask, as another tenant, with an identifier that says what the connector would be shown of the victim's."""
    from kvprov.engines.vllm.stamp import stamp_of

    core = engine.core
    seen = []
    native = core.scheduler.connector.reason_to_bypass
    core.scheduler.connector.reason_to_bypass = lambda asked: seen.append(stamp_of(asked).identifier) or native(asked)
    victim = keys_of(engine, asks={"victim": Ask(tokens, salt=salt)})["victim"]
    assert seen[0].startswith("kvprov:")
    attacks = {
        "digest": Ask(tokens, ((seen[0], 1, 40),)),
        "digest and separator": Ask(tokens, ((seen[0] + "-", 1, 40),)),
        "digest at the end": Ask(tokens, (("x", 1, 40), (seen[0], 1, 50))),
    }
    return {"victim": victim, **keys_of(engine, asks=attacks)}


@pytest.mark.engine
def test_a_forged_identifier_does_not_open_another_tenants_entries(
    processes: Processes, models: Models, store: Path
) -> None:
    found = processes.run(Launch(models.base, store), partial(forged, salt="victim", tokens=TEXT)).results[0]
    victim = found.pop("victim")
    assert len(found) == 3
    for name, attack in found.items():
        assert attack.folder, name
        assert attack.folder != victim.folder, name
        assert not set(attack.chain) & set(victim.chain), name


def test_the_folder_of_a_view_is_what_is_said_here() -> None:
    """ExampleConnector hashes tokens and joined identifiers. With names of one length, only one input gives each."""
    tokens = torch.tensor(TEXT[: 2 * BLOCK]).numpy().tobytes()
    name = names(BASE)[0]
    assert b"\x00" not in f"{name}@40-kvprov:{'A' * 43}".encode()
    assert tokens[7::8] == bytes(2 * BLOCK)
    assert (
        hashlib.md5(tokens + BYTES.encode()).digest()
        == hashlib.md5(torch.tensor(TEXT[: 3 * BLOCK]).numpy().tobytes()).digest()
    )


def test_outputs_of_another_encoder_are_not_taken_for_its_own() -> None:
    """vLLM keeps what the encoder gave by the item's name, also while the weights are exchanged."""
    asked = request(BASE)
    asked.num_computed_tokens = asked.num_preemptions = 0
    inputs.bind(asked, WORKER, adapter_shapes_media=False)
    before = asked.mm_features[0].identifier
    assert inputs.bind(asked, bytes([1] * 32), adapter_shapes_media=False) == ""
    assert asked.mm_features[0].identifier != before
    # Back to the former weights, it has its former name.
    inputs.bind(asked, WORKER, adapter_shapes_media=False)
    assert asked.mm_features[0].identifier == before
    asked.num_computed_tokens = 1
    assert inputs.bind(asked, bytes([1] * 32), adapter_shapes_media=False).startswith("media: what encodes them")
    assert asked.mm_features[0].identifier == before
