"""Writes the test vectors of content identities, spec/vectors/identities.json. Running it again changes nothing.

python scripts/make_identity_vectors.py            write the file
python scripts/make_identity_vectors.py --check    fail if the file is not what would be written
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, TypeAlias

from blake3 import blake3

from kvprov.identity import (
    FleetSecret,
    Tensor,
    adapter_identity,
    client_namespace,
    config_identity,
    load_secret,
    sharing_domain,
    tensors_digest,
    tensors_identity,
)

FILE: Final = Path(__file__).resolve().parents[1] / "spec" / "vectors" / "identities.json"

Json: TypeAlias = dict[str, Any]

SECRET: Final = b"0123456789abcdef0123456789abcdef".hex()
OTHER_SECRET: Final = b"fedcba9876543210fedcba9876543210".hex()


def tensor(name: str, dtype: str, shape: list[int], data: bytes) -> Json:
    return {"name": name, "dtype": dtype, "shape": shape, "data_hex": data.hex()}


A: Final = tensor("model.a.weight", "BF16", [2, 2], bytes(range(8)))
B: Final = tensor("model.b.weight", "F32", [1], b"\x00\x00\x80\x3f")
LORA: Final = [
    tensor("base_model.model.q_proj.lora_A.weight", "F32", [1, 2], bytes(range(8))),
    tensor("base_model.model.q_proj.lora_B.weight", "F32", [2, 1], bytes(range(8, 16))),
]
CONFIG: Final[Json] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 1,
    "lora_alpha": 2,
    "target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.05,
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


def tensors(name: str, *listed: Json) -> Json:
    return {"name": name, "kind": "tensors", "tensors": list(listed)}


def adapter(name: str, fields: Json | None = None, *, extra: Json | None = None, files: Json | None = None) -> Json:
    return {
        "name": name,
        "kind": "adapter",
        "tensors": LORA,
        "config": CONFIG | (fields or {}),
        "extra": extra or {},
        "files": files or {},
    }


def config(name: str, value: Json) -> Json:
    return {"name": name, "kind": "config", "config": value}


def keyed(kind: str, name: str, text: str, secret: str | None = SECRET, key_id: str | None = "2026-1") -> Json:
    field = "salt" if kind == "sharing_domain" else "namespace"
    return {"name": name, "kind": kind, field: text, "secret_hex": secret, "key_id": key_id}


def cases() -> list[Json]:
    return [
        tensors("tensors-none"),
        tensors("tensors-one", A),
        tensors("tensors-two", A, B),
        tensors("tensors-two-in-another-order", B, A),
        tensors("tensors-renamed", A | {"name": "model.c.weight"}),
        tensors("tensors-bit-flipped", A | {"data_hex": "0101020304050607"}),
        tensors("tensors-another-dtype", A | {"dtype": "F16"}),
        tensors("tensors-another-shape", A | {"shape": [4]}),
        tensors("tensors-scalar", tensor("scalar", "F32", [], b"\x00\x00\x80\x3f")),
        tensors("tensors-empty", tensor("empty", "I64", [0, 3], b"")),
        tensors("tensors-below-a-byte", tensor("packed", "F4", [2, 2], b"\x12\x34")),
        tensors(
            "tensors-by-bytes-of-names",
            tensor("\ufb01", "U8", [1], b"\x01"),
            tensor("\U00010000", "U8", [1], b"\x02"),
            tensor("Z", "U8", [1], b"\x03"),
            tensor("a", "U8", [1], b"\x04"),
            tensor("a.b", "U8", [1], b"\x05"),
            tensor("aa", "U8", [1], b"\x06"),
        ),
        adapter("adapter"),
        adapter("adapter-ignored-fields", {"base_model_name_or_path": "/mnt/x", "lora_dropout": 0, "revision": "v2"}),
        adapter("adapter-defaults-said", {"use_rslora": False, "rank_pattern": {}, "modules_to_save": None}),
        adapter("adapter-modules-in-another-order", {"target_modules": ["v_proj", "q_proj", "v_proj"]}),
        adapter("adapter-numbers-as-doubles", {"r": 1.0, "lora_alpha": 2.0}),
        adapter("adapter-alpha", {"lora_alpha": 4}),
        adapter("adapter-rslora", {"use_rslora": True}),
        adapter("adapter-modules-as-expression", {"target_modules": ".*_proj"}),
        adapter("adapter-pattern", {"alpha_pattern": {"q_proj": 4, "0.q_proj": 8}}),
        adapter("adapter-pattern-in-another-order", {"alpha_pattern": {"0.q_proj": 8, "q_proj": 4}}),
        adapter("adapter-init-plain", {"init_lora_weights": "gaussian", "loftq_config": {"loftq_bits": 4}}),
        adapter("adapter-init-changes-base", {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}),
        adapter("adapter-unknown-field", {"invented_field": {"on": True}}),
        adapter("adapter-engine-fact", extra={"is_3d_lora_weight": True}),
        adapter("adapter-further-file", files={"new_embeddings.safetensors": "tensors-v1-blake3:" + "00" * 32}),
        config("config-empty", {}),
        config("config-int", {"rope_theta": 10000}),
        config("config-double", {"rope_theta": 10000.0}),
        config("config-text", {"rope_theta": "10000"}),
        config("config-nested", {"b": [1, 2.5, None, True, "é\n"], "a": {"z": {}, "y": []}}),
        config("config-numbers", {"n": [0, -0.0, 1e-7, 1e21, 1e20, 0.1, -1.5, 5e-324, 9007199254740991]}),
        config("config-large-ints", {"n": [2**53, 2**53 + 1, 2**60, -(2**53) - 1, 2**1024]}),
        {"name": "config-not-finite", "kind": "config", "config_text": '{"n": [Infinity, -Infinity, NaN]}'},
        config(
            "config-poses-as-not-finite", {"n": [{"$float": "Infinity"}, {"$float": "-Infinity"}, {"$float": "NaN"}]}
        ),
        config("config-names-by-utf-16", {"\ufb01": 1, "\U00010000": 2, "$": 3, "": 4}),
        keyed("sharing_domain", "domain", "tenant-1"),
        keyed("sharing_domain", "domain-another-salt", "tenant-2"),
        keyed("sharing_domain", "domain-another-secret", "tenant-1", OTHER_SECRET, "2026-2"),
        keyed("sharing_domain", "domain-another-key-id", "tenant-1", SECRET, "2026-2"),
        keyed("sharing_domain", "domain-default-key-id", "tenant-1", SECRET, None),
        keyed("sharing_domain", "domain-without-secret", "tenant-1", None, None),
        keyed("sharing_domain", "domain-empty-salt", ""),
        keyed("sharing_domain", "domain-half-a-surrogate-pair", "\ud800"),
        keyed("client_namespace", "namespace", "tenant-1"),
        keyed("client_namespace", "namespace-without-secret", "tenant-1", None, None),
        keyed("client_namespace", "namespace-beyond-the-bmp", "\U0001f600"),
    ]


def secret_of(case: Json) -> FleetSecret | None:
    if case["secret_hex"] is None:
        return None
    key = bytes.fromhex(case["secret_hex"])
    return load_secret(file=None, value=key.decode(), key_id=case["key_id"])


def digest_of(listed: list[Json]) -> bytes:
    return tensors_digest(
        Tensor(t["name"], t["dtype"], tuple(t["shape"]), blake3(bytes.fromhex(t["data_hex"])).digest()) for t in listed
    )


def identity(case: Json) -> str:
    match case["kind"]:
        case "tensors":
            return tensors_identity(digest_of(case["tensors"]))
        case "adapter":
            return adapter_identity(
                digest_of(case["tensors"]), case["config"], extra=case["extra"], files=case["files"]
            )
        case "config":
            return config_identity(json.loads(case["config_text"]) if "config_text" in case else case["config"])
        case "sharing_domain":
            return sharing_domain(case["salt"], secret_of(case)).identity
        case "client_namespace":
            return client_namespace(case["namespace"], secret_of(case)).identity
    raise ValueError(case["kind"])


def text() -> str:
    # One vector a line. ASCII, so that half a surrogate pair survives.
    lines = [json.dumps(case | {"identity": identity(case)}, allow_nan=False) for case in cases()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> int:
    wanted = text()
    if "--check" in sys.argv[1:]:
        if FILE.is_file() and FILE.read_text() == wanted:
            return 0
        print(f"{FILE} is not what this script writes; run it without --check.", file=sys.stderr)
        return 1
    FILE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
