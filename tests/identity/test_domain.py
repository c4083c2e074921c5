from __future__ import annotations

import base64
import hashlib
import hmac
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprov.errors import SettingsError
from kvprov.identity import FleetSecret, client_namespace, load_secret, sharing_domain
from kvprov.identity.domain import tag_namespace
from tests.identity import reference

KEY = b"0123456789abcdef"
SECRET = FleetSecret(KEY, "2026-1")


def written(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_the_same_salt_gives_the_same_identity_on_every_worker() -> None:
    assert sharing_domain("tenant-1", SECRET) == sharing_domain("tenant-1", FleetSecret(KEY, "2026-1"))


def test_salts_secrets_and_key_ids_separate() -> None:
    values = [
        make(salt, secret).identity
        for make in (sharing_domain, client_namespace)
        for salt in ("a", "b", "", "a\0", "A", "a ")
        for secret in (SECRET, FleetSecret(KEY[::-1], "2026-1"), FleetSecret(KEY, "2026-2"), None)
    ]
    assert len(set(values)) == 2 * 6 * 4


def test_a_rotated_secret_is_another_identity_also_under_the_default_name() -> None:
    old, again, new = (load_secret(file=None, value=v, key_id=None) for v in (KEY.decode(), KEY.decode(), "f" * 16))
    assert old is not None
    assert new is not None
    assert old == again
    assert old.key_id != new.key_id
    assert sharing_domain("a", old) != sharing_domain("a", new)


def test_the_identity_shows_neither_salt_nor_secret() -> None:
    identity = sharing_domain("tenant-salt", SECRET).identity
    scheme, payload = identity.split(":")
    assert scheme == "hmac-sha256.2026-1"
    assert len(payload) == 43
    assert "tenant" not in identity
    assert sharing_domain("tenant-salt", None).identity.startswith("sha256:")


def test_the_secret_is_never_shown() -> None:
    assert KEY.decode() not in repr(SECRET)
    assert "2026-1" in repr(SECRET)


@given(st.text() | st.sampled_from(["\ud800", "\udfff", "a\udc80", "\ud83d\ude00", "\U0001f600"]))
def test_any_text_is_a_salt(salt: str) -> None:
    octets = salt.encode("utf-8", "surrogatepass")
    assert sharing_domain(salt, SECRET).identity == reference.sharing_domain(octets, KEY.hex(), "2026-1")
    assert client_namespace(salt, None).identity == reference.client_namespace(octets, None, None)


def test_half_surrogate_pairs_stay_apart() -> None:
    salts = ["\ud800", "\ud801", "\udc00", "?", "\ufffd", "\ud83d\ude00", "\U0001f600"]
    assert len({sharing_domain(salt, SECRET) for salt in salts}) == len(salts)


def test_reads_a_file_without_its_last_newline(tmp_path: Path) -> None:
    for i, (raw, key) in enumerate([(KEY, KEY), (KEY + b"\n", KEY), (KEY + b"\n\n", KEY + b"\n"), (b"\xff" * 16,) * 2]):
        secret = load_secret(file=written(tmp_path / str(i), raw), value=None, key_id="k")
        assert secret == FleetSecret(key, "k")
    assert load_secret(file=None, value=KEY.decode(), key_id="k") == FleetSecret(KEY, "k")


def test_bytes_of_the_environment_are_kept() -> None:
    value = os.fsdecode(b"\xff" * 16)
    assert load_secret(file=None, value=value, key_id="k") == FleetSecret(b"\xff" * 16, "k")
    with pytest.raises(SettingsError, match="no text"):
        load_secret(file=None, value="\ud800" * 16, key_id="k")


def test_no_secret() -> None:
    assert load_secret(file=None, value=None, key_id=None) is None


def test_the_default_name_is_stable() -> None:
    secret = load_secret(file=None, value=KEY.decode(), key_id=None)
    assert secret is not None
    assert sharing_domain("a", secret).identity == reference.sharing_domain(b"a", KEY.hex(), None)


@pytest.mark.parametrize("key_id", ["", "A", "a_b", "a.b", "a:b", "a b", "é", "x" * 65, "a\n"])
def test_refuses_a_name_that_is_no_part_of_a_scheme(key_id: str) -> None:
    for good in ("a", "0", "-", "x" * 64):
        sharing_domain("salt", FleetSecret(KEY, good))
    with pytest.raises(SettingsError, match="cannot name"):
        load_secret(file=None, value=KEY.decode(), key_id=key_id)


@pytest.mark.parametrize("raw", [b"", b"\n", b"x" * 15, b"x" * 15 + b"\n"])
def test_refuses_a_short_secret(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(SettingsError, match="fewer than 16") as caught:
        load_secret(file=written(tmp_path / "s", raw), value=None, key_id=None)
    assert "openssl rand" in caught.value.advice


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o660, 0o620, 0o601, 0o777])
def test_refuses_a_file_that_others_can_open(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "s", KEY)
    for good in (0o600, 0o400, 0o440):
        path.chmod(good)
        assert load_secret(file=path, value=None, key_id=None) is not None
    path.chmod(mode)
    with pytest.raises(SettingsError, match=f"mode {mode:04o}") as caught:
        load_secret(file=path, value=None, key_id=None)
    assert "chmod 600" in caught.value.advice


@pytest.mark.timeout(10)
def test_refuses_what_is_no_secret_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    large = written(tmp_path / "large", b"x" * 5000)
    for path in (tmp_path / "missing", tmp_path, tmp_path / "fifo", large, tmp_path / "a\0b"):
        with pytest.raises(SettingsError) as caught:
            load_secret(file=path, value=None, key_id=None)
        assert caught.value.advice


def test_refuses_contradictory_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="twice"):
        load_secret(file=written(tmp_path / "s", KEY), value=KEY.decode(), key_id=None)
    with pytest.raises(SettingsError, match="none is set"):
        load_secret(file=None, value=None, key_id="2026-1")


TAG_SETS = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=4)


@given(TAG_SETS, TAG_SETS, st.randoms())
def test_tags_are_told_apart_and_their_order_does_not_count(
    first: dict[str, str], second: dict[str, str], source: random.Random
) -> None:
    shuffled = list(first.items())
    source.shuffle(shuffled)
    assert tag_namespace(dict(shuffled), SECRET) == tag_namespace(first, SECRET)
    assert (tag_namespace(first, SECRET) == tag_namespace(second, SECRET)) == (first == second)
    assert (tag_namespace(first, None) == tag_namespace(second, None)) == (first == second)


def test_tags_are_hashed_as_the_specification_says() -> None:
    message = b"".join(
        len(part).to_bytes(8, "big") + part if part is not None else (2).to_bytes(8, "big")
        for part in (b"kv-tags/1", None, b"app", b"x", "\u00e9".encode(), b"\xed\xb2\x80")
    )
    tags = {"\u00e9": "\udc80", "app": "x"}
    digest = hmac.digest(KEY, message, "sha256")
    expected = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    assert tag_namespace(tags, SECRET).identity == f"hmac-sha256.2026-1:{expected}"
    digest = hashlib.sha256(message).digest()
    assert tag_namespace(tags, None).identity == f"sha256:{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def test_tags_meet_neither_salts_nor_namespaces_of_text() -> None:
    texts = ["", "a", "app", "appx", "a\0x"]
    plain = {make(text, SECRET).identity for make in (sharing_domain, client_namespace) for text in texts}
    tagged = {tag_namespace(tags, SECRET).identity for tags in ({}, {"app": "x"}, {"appx": ""}, {"": "appx"})}
    assert len(plain) == 10
    assert len(tagged) == 4
    assert not plain & tagged
