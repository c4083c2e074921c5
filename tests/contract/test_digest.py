from __future__ import annotations

import hashlib
import importlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.contract import (
    ABSENT,
    ContractError,
    Descriptor,
    Digester,
    Dimension,
    ErrorCode,
    Half,
    Kind,
    Known,
    Registry,
    Unknown,
    Value,
    digest,
    encode,
    worker_digest,
)
from tests.contract import reference
from tests.contract.forms import as_document
from tests.strategies import cases, descriptors, registries

# By name: `kvprov.contract.digest`, the attribute, is the function.
digest_module = importlib.import_module("kvprov.contract.digest")

REGISTRY = Registry(
    [
        Dimension("weights", Half.WORKER, Kind.COMPUTATIONAL, ""),
        Dimension("adapter", Half.REQUEST, Kind.COMPUTATIONAL, ""),
        Dimension("sharing_domain", Half.REQUEST, Kind.PERMISSION, ""),
    ]
)
WORKER = {"weights": Known("label:w")}


def request(number: int) -> dict[str, Value]:
    return {"adapter": ABSENT if number % 3 else Known("label:a"), "sharing_domain": Known(f"label:{number}")}


def plain(values: dict[str, Value]) -> bytes:
    return digest(REGISTRY, Descriptor(WORKER, values))


@given(cases())
def test_the_digest_is_sha256_of_the_encoding(case: tuple[Registry, Descriptor]) -> None:
    assert digest(*case) == hashlib.sha256(encode(*case)).digest()


@given(cases())
def test_the_worker_digest_covers_the_worker_half_alone(case: tuple[Registry, Descriptor]) -> None:
    registry, descriptor = case
    expected = reference.worker_digest(as_document(registry, descriptor))
    assert worker_digest(registry, descriptor.worker) == expected
    assert Digester(registry, descriptor.worker).worker_digest == expected
    assert expected != digest(registry, descriptor)


@given(registries(), st.data())
def test_a_digester_equals_the_plain_digest(registry: Registry, data: st.DataObject) -> None:
    some = data.draw(st.lists(descriptors(registry), min_size=1, max_size=4))
    worker = some[0].worker
    digester = Digester(registry, worker)
    expected = [digest(registry, Descriptor(worker, each.request)) for each in some]
    assert [digester.digest(each.request) for each in some] == expected
    assert [digester.digest(each.request) for each in reversed(some)] == expected[::-1], "remembered ones differ"


def test_a_digester_is_right_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "REMEMBERED_DIGESTS", 16)
    digester = Digester(REGISTRY, WORKER)
    for number in [*range(50), *range(50), 0, 49, 0]:
        assert digester.digest(request(number)) == plain(request(number))
    assert digester._digest.cache_info().currsize == 16


def test_the_bound_is_finite_and_used() -> None:
    assert Digester(REGISTRY, WORKER)._digest.cache_info().maxsize == digest_module.REMEMBERED_DIGESTS == 4096


def test_a_digester_is_right_from_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    # A bound below the number of requests keeps every thread copying the shared hash state.
    monkeypatch.setattr(digest_module, "REMEMBERED_DIGESTS", 32)
    digester = Digester(REGISTRY, WORKER)
    expected = [plain(request(number)) for number in range(200)]
    threads = 8
    barrier = Barrier(threads)

    def work(offset: int) -> list[bytes]:
        barrier.wait()
        order = [(number + 25 * offset) % 200 for number in range(200)] * 3
        return [found for number in order if (found := digester.digest(request(number))) != expected[number]]

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [[]] * threads


def test_the_order_of_a_request_does_not_matter() -> None:
    digester = Digester(REGISTRY, WORKER)
    backwards = dict(reversed(request(1).items()))
    assert list(backwards) != list(request(1))
    assert digester.digest(backwards) == digester.digest(request(1)) == plain(request(1))


def test_a_digester_keeps_its_worker_half() -> None:
    worker = {"weights": Known("label:w")}
    digester = Digester(REGISTRY, worker)
    worker["weights"] = Known("label:other")
    assert digester.digest(request(1)) == plain(request(1))
    assert digester.worker == WORKER


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"adapter": ABSENT}, ErrorCode.MISSING_DIMENSION),
        ({"adapter": ABSENT, "other": ABSENT}, ErrorCode.MISSING_DIMENSION),
        ({"adapter": ABSENT, "sharing_domain": ABSENT, "weights": ABSENT}, ErrorCode.UNREGISTERED_DIMENSION),
        ({"adapter": Unknown("gone"), "sharing_domain": ABSENT}, ErrorCode.UNKNOWN_VALUE),
    ],
)
def test_a_digester_refuses_what_digest_refuses(values: dict[str, Value], code: ErrorCode) -> None:
    digester = Digester(REGISTRY, WORKER)
    for _ in range(2):  # a refusal is not remembered as anything else
        for compute in (digester.digest, plain):
            with pytest.raises(ContractError) as caught:
                compute(values)
            assert caught.value.code is code
    assert digester.digest(request(0)) == plain(request(0))


def test_a_refusal_gives_the_reason_of_its_own_request() -> None:
    # Unknown values compare equal whatever their reason; a remembered refusal would repeat the first one's.
    digester = Digester(REGISTRY, WORKER)
    for reason in ("first", "second"):
        with pytest.raises(ContractError, match=reason):
            digester.digest({"adapter": Unknown(reason), "sharing_domain": ABSENT})


@pytest.mark.parametrize(
    ("worker", "code"),
    [
        ({}, ErrorCode.MISSING_DIMENSION),
        ({"weights": ABSENT, "adapter": ABSENT}, ErrorCode.UNREGISTERED_DIMENSION),
        ({"weights": Unknown()}, ErrorCode.UNKNOWN_VALUE),
    ],
)
def test_a_worker_half_that_does_not_encode_gives_no_digester(worker: dict[str, Value], code: ErrorCode) -> None:
    for compute in (Digester, worker_digest):
        with pytest.raises(ContractError) as caught:
            compute(REGISTRY, worker)
        assert caught.value.code is code
