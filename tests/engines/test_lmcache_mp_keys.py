"""What is made for the keys of an LMCache server, without one: model names, salts, clients' options, and the helper."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvprov.contract.descriptor import ABSENT, Descriptor, Known
from kvprov.contract.digest import digest
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.key import DigestBits, key_text
from kvprov.engines.lmcache.http import announced, prefetch_body, request_salt
from kvprov.engines.lmcache.mp import allowed_options, layout_name, salt_text
from kvprov.errors import BindingError, SettingsError
from kvprov.identity.adapter import identify_adapter
from kvprov.identity.domain import FleetSecret, sharing_domain
from tests.support.models import BUNDLED

SECRET = FleetSecret(b"a fleet secret of more than sixteen bytes", "fleet")
ADAPTER = BUNDLED / "adapters" / "standard"
WORKER = {
    "kv_representation": "config-v1-sha256:aa",
    "model_config": "config-v1-sha256:bb",
    "precision": "config-v1-sha256:cc",
    "weights": "tensors-v1-blake3:dd",
}
NAMES = ",".join([*WORKER, "adapter", "client_namespace", "sharing_domain"])


def log(*more: str, bits: int = 256, secret: str = "fleet", names: str = NAMES) -> list[str]:
    start = f"mode=enforce connector=LMCacheMPConnector dimensions={names} worker=w bits={bits} secret={secret}"
    said = ["lmcache.model_name=kvprov-name", "lmcache.world_size=2", start]
    said += [f"{name}={identity}" for name, identity in WORKER.items()]
    return [f"(EngineCore pid=7) INFO 11-30 20:00:00 [binding.py:1] kvprov: {line}\n" for line in [*said, *more]]


def expected(bits: DigestBits = DigestBits.FULL, **other: Any) -> str:
    worker = {name: Known(identity) for name, identity in (WORKER | other).items()}
    request = {
        "adapter": Known(identify_adapter(ADAPTER).identity),
        "client_namespace": ABSENT,
        "sharing_domain": sharing_domain("tenant", SECRET),
    }
    return key_text(digest(BUILT_IN, Descriptor(worker, request)), bits)


def salt(*lines: str, **how: Any) -> str:
    return request_salt(announced(log(*lines, **how)), adapter=ADAPTER, tenant_salt="tenant", secret=SECRET)


def test_the_helpers_salt_is_the_digest() -> None:
    assert salt() == expected()
    assert salt(bits=128) == expected(DigestBits.SHORT)


def test_the_later_announcement_is_meant() -> None:
    assert salt("weights=label:run-7/2") == expected(weights="label:run-7/2")
    # The same file, after the engine was started again.
    assert salt("weights=label:run-7/2", *(line.split("kvprov: ")[1] for line in log())) == expected()


def test_no_salt_for_what_the_engine_does_not_know() -> None:
    with pytest.raises(BindingError, match="no value for weights"):
        salt("weights=Unknown(reason='weights: pickles')")


def test_no_salt_without_the_engines_secret() -> None:
    worker = announced(log())
    with pytest.raises(SettingsError, match="fleet secret is fleet, and the one given here is none"):
        request_salt(worker, adapter=ADAPTER, tenant_salt="tenant")
    with pytest.raises(SettingsError, match="secret is none, and the one given here is fleet"):
        request_salt(announced(log(secret="none")), secret=SECRET)


def test_an_outside_dimension_has_to_be_given() -> None:
    worker = announced(log(names=f"{NAMES},acme.tone"))
    with pytest.raises(BindingError, match=r"no value for acme\.tone"):
        request_salt(worker, secret=SECRET)
    given = request_salt(worker, secret=SECRET, values={"acme.tone": Known("acme-tone:low")})
    assert given != request_salt(announced(log()), secret=SECRET)


def test_an_empty_salt_is_none() -> None:
    worker = announced(log())
    assert request_salt(worker, tenant_salt="", secret=SECRET) == request_salt(worker, secret=SECRET)


@pytest.mark.parametrize("lines", [[], log()[1:], log()[:2], ["nothing"]], ids=["empty", "no name", "cut", "other"])
def test_another_log_is_refused(lines: list[str]) -> None:
    with pytest.raises(BindingError, match="not the log of an engine"):
        announced(lines)


def test_the_body_of_a_prefetch() -> None:
    body = prefetch_body(announced(log()), (1, 2), "salt")
    assert body == {"model_name": "kvprov-name", "world_size": 2, "token_ids": [1, 2], "cache_salt": "salt"}


FACTS = {"architectures": ["A"], "dtype": "torch.bfloat16", "layers": 4, "ranks": {"tensor": 1, "pipeline": 2}}


def test_a_model_name_says_how_entries_are_laid_out_and_nothing_else() -> None:
    # No character that LMCache, or a file system, reads a meaning into.
    assert re.fullmatch(r"kvprov-[A-Za-z0-9_-]{22}", layout_name(FACTS))
    assert layout_name(dict(reversed(FACTS.items()))) == layout_name(FACTS)
    others: list[dict[str, Any]] = [{"dtype": "torch.float16"}, {"layers": 5}, {"ranks": {"tensor": 2, "pipeline": 1}}]
    assert len({layout_name(FACTS | other) for other in [{}, *others]}) == 1 + len(others)


def test_media_enter_the_salt_in_full_and_in_order() -> None:
    text = "T" * 43
    assert salt_text(text, []) == text
    salts = [salt_text(text, media) for media in (["a@1"], ["a@2"], ["a@1", "b@2"], ["b@2", "a@1"], ["a@1b@2"], [""])]
    assert len({*salts, text, salt_text("U" * 43, ["a@1"])}) == len(salts) + 2
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", one) for one in salts)
    assert salt_text(text, ["a@1"]) == salts[0]


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        (None, None),
        ({}, None),
        ({"lmcache.max_offload_tokens": 64}, {"lmcache.max_offload_tokens": 64}),
        ({"lmcache.max_offload_tokens": 0, "lmcache.tag.kvprov": "x"}, {"lmcache.max_offload_tokens": 0}),
        ({"lmcache.cache_salt": "x"}, None),
        *(({"lmcache.max_offload_tokens": value}, None) for value in ("64", -1, True, 1.5, None, [1])),
    ],
)
def test_clients_options_are_an_allow_list(sent: dict[str, Any] | None, passed: dict[str, Any] | None) -> None:
    assert allowed_options(sent) == passed
