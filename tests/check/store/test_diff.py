"""Two stores: collisions are found in every format, and nothing in a store can do harm."""

from __future__ import annotations

import json
import os
import socket
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.check.store import StoreDiff, diff_stores
from kvprov.check.store.diff import LISTED
from kvprov.check.store.formats import FORMATS, entry
from kvprov.check.store.payload import PIECE
from kvprov.errors import StoreError
from tests.check.store.stores import NAMES_NO_TYPE, WRITERS, bf16, example, name, put, safetensors, sglang, vllm_fs

VALUES = np.linspace(-4, 4, 256).astype("<f4").view("<u4") & 0xFFFF0000
VALUES = VALUES.astype("<u4").view("<f4")


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    return tmp_path / "a", tmp_path / "b"


def counts(found: StoreDiff) -> dict[str, int]:
    report = found.to_json()
    wanted = ("equal", "within_tolerance", "collisions", "undecided", "only_first", "only_second")
    return {key: report[key] for key in wanted if report[key]}


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_collisions_equal_entries_and_those_of_one_store_are_told_apart(form: str, two: tuple[Path, Path]) -> None:
    a, b = two
    other = VALUES.copy()
    other[100] += 2.0
    write = WRITERS[form]
    for number in range(4):
        write(a, number, VALUES)
    for number in range(1, 6):
        key = write(b, number, other if number == 2 else VALUES)
        colliding = key if number == 2 else locals().get("colliding", "")
    found = diff_stores(a, b, dtype="bfloat16" if form in NAMES_NO_TYPE else None)
    assert counts(found) == {"equal": 2, "collisions": 1, "only_first": 1, "only_second": 2}
    assert dict(found.formats) == {form: 9}
    (collision,) = found.collisions
    assert collision.key == colliding
    assert (collision.outcome.largest, collision.outcome.elements) == (pytest.approx(2.0, abs=0.05), 1)
    assert collision.outcome.dtype == "bfloat16"
    # By the format's name alone, and both ways round.
    assert counts(diff_stores(b, a, only=form))["collisions"] == 1


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_a_tolerance_forgives_what_it_covers_and_no_more(form: str, two: tuple[Path, Path]) -> None:
    a, b = two
    for number, apart in enumerate((0.0, 0.25, 1.0)):
        other = VALUES.copy()
        other[128] = apart
        mine = VALUES.copy()
        mine[128] = 0.0
        WRITERS[form](a, number, mine)
        WRITERS[form](b, number, other)
    assert counts(diff_stores(a, b)) == {"equal": 1, "collisions": 2}
    found = diff_stores(a, b, tolerance=0.25, dtype="bfloat16" if form in NAMES_NO_TYPE else None)
    assert counts(found) == {"equal": 1, "within_tolerance": 1, "collisions": 1}


def test_without_a_known_type_a_tolerance_forgives_nothing(two: tuple[Path, Path]) -> None:
    a, b = two
    sglang(a, 0, VALUES)
    sglang(b, 0, VALUES + 0.01)
    found = diff_stores(a, b, tolerance=100.0)
    assert counts(found) == {"collisions": 1}
    assert next(iter(found.collisions)).outcome.largest is None


def test_what_is_not_a_number_is_never_within_a_tolerance(two: tuple[Path, Path]) -> None:
    a, b = two
    other = VALUES.copy()
    other[3] = np.nan
    example(a, 0, VALUES)
    example(b, 0, other)
    example(a, 1, other)
    example(b, 1, other)
    found = diff_stores(a, b, tolerance=1e30)
    assert counts(found) == {"equal": 1, "collisions": 1}
    assert found.to_json()["colliding"][0]["largest_difference"] == "Infinity"
    json.dumps(found.to_json(), allow_nan=False)


def test_a_difference_beyond_the_first_piece_is_found(two: tuple[Path, Path]) -> None:
    a, b = two
    values = np.zeros(PIECE, "<f4")
    other = values.copy()
    other[-1] = 1.0
    example(a, 0, values)
    example(b, 0, other)
    (collision,) = diff_stores(a, b).collisions
    assert (collision.outcome.largest, collision.outcome.elements) == (1.0, 1)


def test_entries_are_not_held_in_memory(two: tuple[Path, Path]) -> None:
    for root, last in zip(two, (b"\0", b"\1"), strict=True):
        file = put(root, f"{name(0)}_m_0_1.bin", b"")
        with file.open("r+b") as out:
            out.truncate(64 << 20)
            out.seek((64 << 20) - 1)
            out.write(last)
    diff_stores(*two, dtype="bfloat16")
    tracemalloc.start()
    assert counts(diff_stores(*two, dtype="bfloat16")) == {"collisions": 1}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20, peak


def test_two_forms_of_one_key_collide_and_say_how(two: tuple[Path, Path]) -> None:
    a, b = two
    path = f"{name(0)[:32]}/x.safetensors"
    put(a, path, safetensors({"kv_cache": ("BF16", [4], bytes(8))}))
    put(b, path, safetensors({"kv_cache": ("F16", [4], bytes(8))}))
    sglang(a, 1, VALUES)
    sglang(b, 1, VALUES[:128] + 1)
    found = diff_stores(a, b)
    assert counts(found) == {"collisions": 2}
    reasons = " ".join(item.outcome.reason for item in found.collisions)
    assert "BF16 [4] and F16 [4]" in reasons
    assert "512 and 256 bytes" in reasons


def test_a_header_alone_makes_no_collision(two: tuple[Path, Path]) -> None:
    a, b = two
    path = f"{name(0)[:32]}/x.safetensors"
    put(a, path, safetensors({"kv_cache": ("BF16", [4], bytes(8))}))
    put(b, path, safetensors({"kv_cache": ("BF16", [4], bytes(8))}, {"written": "later"}))
    assert counts(diff_stores(a, b)) == {"equal": 1}


@pytest.mark.parametrize("form", sorted(WRITERS))
@pytest.mark.parametrize("left", [0, 1, 20, 200])
def test_an_entry_that_is_cut_off_is_reported_not_raised(form: str, left: int, two: tuple[Path, Path]) -> None:
    a, b = two
    key = WRITERS[form](a, 0, VALUES)
    WRITERS[form](b, 0, VALUES)
    (b / key).write_bytes((b / key).read_bytes()[:left])
    for first, second in ((a, b), (b, a)):
        found = diff_stores(first, second)
        assert counts(found) == {"undecided": 1}
        (item,) = found.undecided
        assert item.outcome.reason
    assert "could not be compared" in found.words


def test_links_and_odd_files_are_neither_followed_nor_opened(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    key = sglang(a, 0, VALUES)
    sglang(b, 0, VALUES)
    outside = put(tmp_path / "outside", key, b"secret")
    (a / f"{name(1)}_m_0_1.bin").symlink_to(outside)
    put(b, f"{name(1)}_m_0_1.bin", b"secret")
    os.mkfifo(a / f"{name(2)}_m_0_1.bin")
    put(b, f"{name(2)}_m_0_1.bin", b"x")
    (a / "linked").symlink_to(tmp_path / "outside")
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(a)
    listener.bind(f"{name(3)}_m_0_1.bin")
    loop = a / "loop"
    loop.symlink_to(a)
    found = diff_stores(a, b)
    listener.close()
    assert counts(found) == {"equal": 1}
    assert found.odd == 5
    reversed_ = diff_stores(b, a)
    # What is a link in the other store cannot be compared, and is no reason to follow it.
    assert counts(reversed_) == {"equal": 1, "undecided": 2}


def test_a_folder_that_is_a_link_in_one_store_is_not_followed(two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    key = example(tmp_path / "outside", 0, VALUES)
    folder = key.partition("/")[0]
    (a / folder).symlink_to(tmp_path / "outside" / folder)
    example(b, 0, VALUES + 1)
    for first, second in ((a, b), (b, a)):
        assert counts(diff_stores(first, second)) == {"undecided": 1}


def test_other_files_are_counted_and_left_alone(two: tuple[Path, Path]) -> None:
    a, b = two
    for root in two:
        vllm_fs(root, 0, VALUES)
        put(root, "README", b"")
        put(root, f".{name(5)}.tmp", b"")
    put(a, "README", b"other")
    found = diff_stores(a, b)
    assert counts(found) == {"equal": 1}
    assert found.others == 6


def test_snapshots_of_one_store(two: tuple[Path, Path]) -> None:
    a, b = two
    for number in range(3):
        example(a, number, VALUES)
        example(b, number, VALUES)
    example(b, 7, VALUES)
    assert counts(diff_stores(a, b)) == {"equal": 3, "only_second": 1}
    example(b, 1, VALUES * 2)
    assert counts(diff_stores(a, b)) == {"equal": 2, "collisions": 1, "only_second": 1}


def test_stores_without_a_key_in_common_have_nothing_to_collide(two: tuple[Path, Path]) -> None:
    example(two[0], 0, VALUES)
    example(two[1], 1, VALUES)
    found = diff_stores(*two)
    assert (found.shared, found.only_first, found.only_second) == (0, 1, 1)
    assert "nothing to collide" in found.words


def test_all_are_counted_and_the_first_are_listed(two: tuple[Path, Path]) -> None:
    total = 2 * LISTED + 50
    keys = []
    for number in range(total):
        keys.append(f"{name(number)}_m_0_1.bin")
        for root, data in zip(two, (b"a", b"b"), strict=True):
            put(root, keys[-1], data)
    report = diff_stores(*two).to_json()
    assert report["collisions"] == total
    assert [item["key"] for item in report["colliding"]] == sorted(keys)[:LISTED]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"only": "tape"}, "'tape' is no format"),
        ({"dtype": "complex"}, "no element type"),
        ({"tolerance": -1.0}, "A tolerance of -1.0 is none"),
        ({"tolerance": float("nan")}, "A tolerance of nan is none"),
        ({}, "Neither store holds an entry"),
    ],
)
def test_what_cannot_be_done_is_said(two: tuple[Path, Path], arguments: dict[str, object], says: str) -> None:
    with pytest.raises(StoreError, match=says) as caught:
        diff_stores(*two, **arguments)  # type: ignore[arg-type]
    assert caught.value.advice


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    for wrong in (tmp_path / "no", Path("a\0b")):
        with pytest.raises(StoreError, match="cannot be read"):
            diff_stores(tmp_path, wrong)


def test_types_are_as_wide_as_numbers_say(two: tuple[Path, Path]) -> None:
    a, b = two
    path = f"{name(0)[:32]}/x.safetensors"
    rows = {
        "BF16": bf16(np.array([1.0])),
        "F16": np.array([1.0], "<f2").tobytes(),
        "F32": np.array([1.0], "<f4").tobytes(),
        "F64": np.array([1.0], "<f8").tobytes(),
        "F8_E4M3": bytes([0x38]),
        "F8_E5M2": bytes([0x3C]),
        "I8": bytes([1]),
        "U8": bytes([1]),
    }
    for dtype, row in rows.items():
        put(a, path, safetensors({"kv_cache": (dtype, [1], row)}))
        put(b, path, safetensors({"kv_cache": (dtype, [1], bytes(len(row)))}))
        (collision,) = diff_stores(a, b).collisions
        assert (collision.outcome.largest, collision.outcome.elements) == (1.0, 1), dtype


def test_eight_bit_floats_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from kvprov.check.store.numbers import _decoders

    every = bytes(range(256))
    for ours, theirs in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        expected = torch.frombuffer(bytearray(every), dtype=theirs).to(torch.float64).numpy()
        assert np.array_equal(_decoders()[ours](every).astype("f8"), expected, equal_nan=True)


@given(st.binary(max_size=64), st.binary(max_size=64), st.sampled_from(sorted(WRITERS)))
def test_any_bytes_are_compared_or_reported(
    tmp_path_factory: pytest.TempPathFactory, one: bytes, two: bytes, form: str
) -> None:
    a, b = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    path = WRITERS[form](a, 0, VALUES)
    put(a, path, one)
    put(b, path, two)
    found = diff_stores(a, b, tolerance=0.0)
    assert found.shared == 1
    if one == two:
        assert not found.collisions
    elif found.equal:
        # Two headers that mean the same, at most.
        assert form == "example"


@given(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=60))
def test_names_of_any_kind_are_classified(text: str) -> None:
    found = entry(text)
    assert found is None or found.format.name in FORMATS


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=7, max_size=12), st.binary(max_size=64))
def test_any_header_of_lmcache_s_is_read(
    tmp_path_factory: pytest.TempPathFactory, head: list[int], data: bytes
) -> None:
    a, b = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    path = f"kvprov@1@0@{name(0)}@bfloat16.data"
    put(a, path, struct.pack(f"<{len(head)}i", *head) + data)
    put(b, path, struct.pack(f"<{len(head)}i", *head) + data[::-1])
    found = diff_stores(a, b)
    assert found.shared == 1
    assert not (found.equal and data != data[::-1])
