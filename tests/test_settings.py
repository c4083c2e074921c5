from __future__ import annotations

from pathlib import Path

import pytest

from kvprov.contract.key import DigestBits
from kvprov.errors import SettingsError
from kvprov.settings import NAMES, Mode, Settings, load_settings


def test_defaults_enforce() -> None:
    settings = load_settings({})
    assert settings.mode is Mode.ENFORCE
    assert settings.digest_bits is DigestBits.FULL
    assert settings.unsafe_withhold == ()
    assert not settings.require_secret
    assert settings.secret is settings.secret_file is settings.weights_label is None


def test_each_setting_is_read() -> None:
    settings = load_settings(
        {
            "KVPROV_MODE": "off",
            "KVPROV_DIGEST_BITS": "128",
            "KVPROV_SECRET": "s",
            "KVPROV_SECRET_FILE": "/secret",
            "KVPROV_SECRET_KEY_ID": "k",
            "KVPROV_REQUIRE_SECRET": "Yes",
            "KVPROV_WEIGHTS_LABEL": "run/1",
            "KVPROV_WEIGHTS_RUN": "run-2",
            "KVPROV_PEERS": "10.0.0.1:7000, [::1]:7001",
            "KVPROV_CACHE_DIR": "/cache",
            "KVPROV_LEDGER": "s3://bucket/ledger",
            "KVPROV_UNSAFE_WITHHOLD": "adapter, weights,",
            "PATH": "/bin",
        }
    )
    assert settings.mode is Mode.OFF
    assert settings.digest_bits is DigestBits.SHORT
    assert (settings.secret, settings.secret_file, settings.secret_key_id) == ("s", Path("/secret"), "k")
    assert settings.require_secret
    assert settings.weights_label == "run/1"
    assert settings.weights_run == "run-2"
    assert settings.peers == ("10.0.0.1:7000", "[::1]:7001")
    assert settings.cache_dir == Path("/cache")
    assert settings.ledger == "s3://bucket/ledger"
    assert settings.unsafe_withhold == ("adapter", "weights")


def test_every_field_has_its_name_and_its_sentence() -> None:
    fields = [attribute.name for attribute in Settings.__attrs_attrs__]
    assert tuple(f"KVPROV_{field.upper()}" for field in fields) == NAMES
    for name in NAMES:
        assert name in (Settings.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVPROV_WEIGHTS_RUN", "run/2"),
        ("KVPROV_PEERS", "10.0.0.1"),
        ("KVPROV_PEERS", ":7000"),
        ("KVPROV_PEERS", "host:0"),
        ("KVPROV_PEERS", "host:99999"),
        ("KVPROV_PEERS", "http://host:1"),
        ("KVPROV_PEERS", "*:1"),
        ("KVPROV_WEIGHTS_RUN", ""),
        ("KVPROV_MODE", "of"),
        ("KVPROV_MODE", ""),
        ("KVPROV_DIGEST_BITS", "64"),
        ("KVPROV_DIGEST_BITS", "many"),
        ("KVPROV_REQUIRE_SECRET", "perhaps"),
        ("KVPROV_UNSAFE_WITHHOLD", "Adapter"),
        ("KVPROV_LEDGER", "/ledger\x1b[2J"),
        ("KVPROV_MODUS", "off"),
        ("KVPROV_", "x"),
    ],
)
def test_what_cannot_be_used_is_refused_with_advice(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({name: value})
    assert caught.value.advice


@pytest.mark.parametrize(
    "name",
    ["KVPROV_SERVICE_HOST", "KVPROV_PORT", "KVPROV_STORE_SERVICE_PORT_HTTP", "KVPROV_STORE_PORT_80_TCP_ADDR"],
)
def test_the_links_of_a_kubernetes_service_are_not_settings(name: str) -> None:
    assert load_settings({name: "10.0.0.1"}) == load_settings({})


def test_values_of_secrets_do_not_show() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"KVPROV_SECRET": "hush-hush-hush-hush", "KVPROV_MODE": "x"})
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(load_settings({"KVPROV_SECRET": "hush-hush-hush-hush"}))
    assert "hush" not in repr(load_settings({"KVPROV_LEDGER": "sftp://user:hush@host/ledger"}))
