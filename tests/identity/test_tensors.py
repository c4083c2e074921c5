from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvprov.identity.tensors as module
from kvprov.errors import ChangedContentError, KvprovError
from kvprov.identity import Tensor, hash_file, open_file, tensors_digest, tensors_identity
from tests.identity import reference
from tests.identity.support import WEIGHTS, Tensors, flipped, overwrite, packed


def hashed(path: Path, tensors: Tensors, *, mapped: bool = True) -> tuple[Tensor, ...]:
    path.write_bytes(packed(tensors))
    with open_file(path) as file:
        return hash_file(file, mapped=mapped)


def as_reference(tensors: Tensors) -> list[dict[str, object]]:
    return [{"name": n, "dtype": d, "shape": s, "data_hex": raw.hex()} for n, (d, s, raw) in tensors.items()]


@pytest.mark.parametrize("mapped", [True, False])
def test_hashes_each_tensor(tmp_path: Path, mapped: bool) -> None:
    found = hashed(tmp_path / "f", WEIGHTS, mapped=mapped)
    assert found == tuple(Tensor(n, d, tuple(s), blake3(raw).digest()) for n, (d, s, raw) in WEIGHTS.items())
    assert tensors_digest(found) == reference.tensors_digest(as_reference(WEIGHTS))


@pytest.mark.parametrize("mapped", [True, False])
def test_large_tensors_in_chunks_and_on_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", (1 << 20) + 4097)
    raw = random.Random(1).randbytes((3 << 20) + 5)
    tensors: Tensors = {"small": ("U8", [3], b"abc"), "large": ("U8", [len(raw)], raw), "none": ("F32", [0], b"")}
    path = tmp_path / "f"
    path.write_bytes(packed(tensors))
    steps: list[int] = []
    with open_file(path) as file:
        found = hash_file(file, steps.append, mapped=mapped)
    assert [t.digest for t in found] == [blake3(raw).digest() for _, _, raw in tensors.values()]
    assert sum(steps) == len(raw) + 3
    assert len(steps) == 4


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert hashed(tmp_path / "f", {}) == ()
    assert tensors_digest(()) == reference.tensors_digest([])


@pytest.mark.parametrize("mapped", [True, False])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1 << 20)
    path = tmp_path / "f"
    path.write_bytes(packed({"a": ("U8", [64 << 20], b"\0" * (64 << 20))}))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    most = 0

    def note(_: int) -> None:
        nonlocal most
        most = max(most, resident() - before)

    with open_file(path) as file:
        tracemalloc.start()
        hash_file(file, note, mapped=mapped)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20
    assert most < 24 << 20


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    "change", [lambda path: overwrite(path, packed(flipped(WEIGHTS, "model.norm.bias"))), Path.touch]
)
def test_a_change_while_hashing_is_seen(tmp_path: Path, mapped: bool, change: Callable[[Path], None]) -> None:
    path = tmp_path / "f"
    path.write_bytes(packed(WEIGHTS))
    with open_file(path) as file:
        file.settle()
        hash_file(file, mapped=mapped)
        with pytest.raises(ChangedContentError):
            hash_file(file, lambda _: change(path), mapped=mapped)
        with pytest.raises(ChangedContentError):
            hash_file(file, mapped=mapped)


def test_a_file_truncated_before_it_is_mapped_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(packed({"a": ("U8", [1 << 20], b"\0" * (1 << 20))}))
    with open_file(path) as file:
        hash_file(file)
        os.truncate(path, 100_000)
        with pytest.raises(ChangedContentError):
            hash_file(file)


@pytest.mark.timeout(20)
def test_a_file_truncated_while_it_is_read_gives_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4096)
    path = tmp_path / "f"
    path.write_bytes(packed({"a": ("U8", [1 << 20], b"\0" * (1 << 20))}))
    with open_file(path) as file, pytest.raises(ChangedContentError, match="truncated"):
        hash_file(file, lambda _: os.truncate(path, 10_000), mapped=False)


SOME = Tensor("a", "U8", (4,), bytes(32))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([SOME, SOME], "occurs twice"),
        ([Tensor("\ud800", "U8", (4,), bytes(32))], "has no encoding"),
        ([Tensor("a", "U8", (-1,), bytes(32))], "has no encoding"),
        ([Tensor("a", "U8", (2**64,), bytes(32))], "has no encoding"),
        ([Tensor("a", "U8", (4,), bytes(16))], "has 16 bytes"),
    ],
)
def test_refuses_what_has_no_encoding(bad: list[Tensor], reason: str) -> None:
    tensors_digest([SOME])
    with pytest.raises(KvprovError, match=reason) as caught:
        tensors_digest(bad)
    assert caught.value.advice


def test_the_identity_names_its_scheme() -> None:
    assert tensors_identity(b"\xab" * 32) == "tensors-v1-blake3:" + "ab" * 32


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ["a", "b", "a.b", "ａ", "\U00010000"]
)
TENSOR = st.tuples(st.sampled_from(["U8", "I8", "BOOL"]), st.binary(max_size=6)).map(
    lambda t: (t[0], [len(t[1])], t[1])
)
MANY = st.dictionaries(NAMES.filter(lambda n: n != "__metadata__"), TENSOR, min_size=1, max_size=6)
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(MANY, st.data())
def test_sharding_and_order_do_not_matter(tmp_path: Path, tensors: dict[str, object], data: st.DataObject) -> None:
    whole = hashed(tmp_path / "f", tensors)  # type: ignore[arg-type]
    names = data.draw(st.permutations(list(tensors)))
    cut = data.draw(st.integers(0, len(names)))
    parts = [{name: tensors[name] for name in some} for some in (names[cut:], names[:cut])]
    sharded = [t for part in parts for t in hashed(tmp_path / "f", part)]  # type: ignore[arg-type]
    assert tensors_digest(whole) == tensors_digest(sharded)
    assert tensors_digest(whole) == reference.tensors_digest(as_reference(tensors))  # type: ignore[arg-type]


@PROPERTY
@given(MANY, st.data())
def test_every_difference_matters(tmp_path: Path, tensors: dict[str, object], data: st.DataObject) -> None:
    path = tmp_path / "f"
    before = tensors_digest(hashed(path, tensors))  # type: ignore[arg-type]
    assert before == tensors_digest(hashed(path, dict(tensors)))  # type: ignore[arg-type]
    name = data.draw(st.sampled_from(sorted(tensors)))
    dtype, shape, raw = tensors[name]  # type: ignore[misc]
    changed = {
        "dtype": {**tensors, name: ("F8_E5M2", shape, raw)},
        "shape": {**tensors, name: (dtype, [1, *shape], raw)},
        "renamed": {name + "_" if key == name else key: value for key, value in tensors.items() if key != name + "_"},
        "without": {key: value for key, value in tensors.items() if key != name},
        "with": {**tensors, "another": ("U8", [0], b"")},
    }
    if raw:
        changed["bit"] = flipped(tensors, name, data.draw(st.integers(0, len(raw) * 8 - 1)))  # type: ignore[arg-type]
        changed["longer"] = {**tensors, name: (dtype, [len(raw) + 1], raw + b"\0")}
    digests = {kind: tensors_digest(hashed(path, other)) for kind, other in changed.items()}  # type: ignore[arg-type]
    assert [kind for kind, digest in digests.items() if digest == before and changed[kind] != tensors] == []


def test_what_is_in_one_tensor_cannot_move_into_another(tmp_path: Path) -> None:
    def digest(tensors: Tensors) -> bytes:
        return tensors_digest(hashed(tmp_path / "f", tensors))

    digests = {
        digest({"a": ("U8", [1], b"x"), "b": ("U8", [1], b"y")}),
        digest({"a": ("U8", [1], b"y"), "b": ("U8", [1], b"x")}),
        digest({"a": ("U8", [2], b"xy"), "b": ("U8", [0], b"")}),
        digest({"a": ("U8", [0], b""), "b": ("U8", [2], b"xy")}),
        digest({"ab": ("U8", [2], b"xy")}),
    }
    assert len(digests) == 5
