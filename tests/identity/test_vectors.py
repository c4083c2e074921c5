"""The vectors, recomputed by the second implementation, which shares no code with the one that wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvprov.contract import Known
from tests.identity import reference

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "spec/vectors/identities.json").read_text())
BY_NAME = {vector["name"]: vector for vector in VECTORS}

EQUAL = [
    {"tensors-two", "tensors-two-in-another-order"},
    {
        "adapter",
        "adapter-ignored-fields",
        "adapter-defaults-said",
        "adapter-modules-in-another-order",
        "adapter-numbers-as-doubles",
        "adapter-init-plain",
    },
    {"config-int", "config-double"},
    {"precision", "precision-other-names"},
    {"kv", "kv-groups-in-another-order", "kv-encoding-said"},
    {"model-config", "model-config-ignored-members", "model-config-nulls"},
    {"model-config-text-config", "model-config-text-config-of-more-layers"},
]


def recomputed(vector: dict[str, Any]) -> str:
    match vector["kind"]:
        case "tensors":
            return f"tensors-v1-blake3:{reference.tensors_digest(vector['tensors']).hex()}"
        case "adapter":
            return reference.adapter_identity(vector["tensors"], vector["config"], vector["engine"], vector["files"])
        case "config":
            value = json.loads(vector["config_text"]) if "config_text" in vector else vector["config"]
            return reference.config_identity(value)
        case "precision":
            return reference.precision(vector["facts"])
        case "kv_representation":
            return reference.kv_representation(vector["facts"])
        case "model_config":
            return reference.model_config(vector["config"], vector["resolved"])
        case "sharing_domain":
            salt = bytes.fromhex(vector["salt_hex"]) if "salt_hex" in vector else vector["salt"].encode()
            return reference.sharing_domain(salt, vector["secret_hex"], vector["key_id"])
        case "client_namespace":
            return reference.client_namespace(vector["namespace"].encode(), vector["secret_hex"], vector["key_id"])
    raise AssertionError(vector["kind"])


@pytest.mark.parametrize("name", BY_NAME)
def test_recomputes(name: str) -> None:
    vector = BY_NAME[name]
    assert recomputed(vector) == vector["identity"]
    Known(vector["identity"])


def test_strict_readers_take_the_file() -> None:
    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for pair in value.items() for item in pair for text in texts(item)]
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]
        return [value] if isinstance(value, str) else []

    for text in texts(VECTORS):
        text.encode()
    # An empty salt or namespace is an absent dimension, which has no identity.
    assert not any(vector.get(member) == "" for vector in VECTORS for member in ("salt", "salt_hex", "namespace"))


def test_exactly_the_named_ones_are_equal() -> None:
    assert len(BY_NAME) == len(VECTORS) >= 25
    groups: dict[str, set[str]] = {}
    for vector in VECTORS:
        groups.setdefault(vector["identity"], set()).add(vector["name"])
    assert sorted(map(sorted, (group for group in groups.values() if len(group) > 1))) == sorted(map(sorted, EQUAL))


def test_the_script_writes_this_file() -> None:
    script = ROOT / "scripts/make_identity_vectors.py"
    run = subprocess.run(
        [sys.executable, str(script), "--check"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
