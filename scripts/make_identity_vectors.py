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

from kvprov.contract import Known
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
from kvprov.identity.kv_representation import KvRepresentation, LayerGroup, kv_representation
from kvprov.identity.model_config import model_config
from kvprov.identity.precision import Precision, precision

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
PRECISION: Final[Json] = {
    "weight_dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "quantization": None,
    "parameters": {},
    "adapter_dtype": None,
}
FP8: Final[Json] = PRECISION | {
    "quantization": "fp8",
    "parameters": {"checkpoint": {"quant_method": "fp8", "activation_scheme": "dynamic"}, "engine": None},
}
GROUP: Final[Json] = {
    "kind": "attention",
    "layers": 10,
    "element": "bfloat16",
    "encoding": "auto",
    "kv_heads": 8,
    "head_size": 128,
    "head_size_v": 128,
}
SMALL_GROUP: Final = GROUP | {"layers": 2, "head_size": 64, "head_size_v": 64}
MODEL: Final[Json] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "model_type": "llama",
    "num_hidden_layers": 12,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
RESOLVED: Final[Json] = {
    "architecture": "LlamaForCausalLM",
    "disable_sliding_window": False,
}


def tensors(name: str, *listed: Json) -> Json:
    return {"name": name, "kind": "tensors", "tensors": list(listed)}


def adapter(name: str, fields: Json | None = None, *, engine: Json | None = None, files: Json | None = None) -> Json:
    return {
        "name": name,
        "kind": "adapter",
        "tensors": LORA,
        "config": CONFIG | (fields or {}),
        "engine": engine or {},
        "files": files or {},
    }


def config(name: str, value: Json) -> Json:
    return {"name": name, "kind": "config", "config": value}


def precise(name: str, facts: Json) -> Json:
    return {"name": name, "kind": "precision", "facts": facts}


def represented(name: str, *groups: Json, **facts: str) -> Json:
    return {
        "name": name,
        "kind": "kv_representation",
        "facts": {
            "groups": list(groups),
            "layout": "LBHNC",
            "packing": "Attention:FLASH_ATTN:16:128+Attention:FLASH_ATTN:16:256",
        }
        | facts,
    }


def model(name: str, fields: Json | None = None, resolved: Json | None = None) -> Json:
    return {
        "name": name,
        "kind": "model_config",
        "config": MODEL | (fields or {}),
        "resolved": RESOLVED | (resolved or {}),
    }


def keyed(kind: str, name: str, text: str, secret: str | None = SECRET, key_id: str | None = "2026-1") -> Json:
    field = "salt" if kind == "sharing_domain" else "namespace"
    return {"name": name, "kind": kind, field: text, "secret_hex": secret, "key_id": key_id}


def half_a_pair(name: str) -> Json:
    # In octets: strict readers refuse a file of JSON whose texts hold half a surrogate pair.
    case = keyed("sharing_domain", name, "")
    del case["salt"]
    return {**case, "salt_hex": "\ud800".encode("utf-8", "surrogatepass").hex()}


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
        adapter("adapter-engine-fact", engine={"is_3d_lora_weight": True}),
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
        precise("precision", PRECISION),
        precise(
            "precision-other-names",
            PRECISION
            | {
                "weight_dtype": "torch.bfloat16",
                "compute_dtype": "BF16",
                "parameters": {"checkpoint": None},
                "adapter_dtype": "bf16",
            },
        ),
        precise("precision-half", PRECISION | {"weight_dtype": "half", "compute_dtype": "torch.float16"}),
        precise("precision-adapters-otherwise", PRECISION | {"adapter_dtype": "float"}),
        precise("precision-quantized", FP8),
        precise(
            "precision-quantized-null-left-out", FP8 | {"parameters": {"checkpoint": FP8["parameters"]["checkpoint"]}}
        ),
        precise("precision-quantized-otherwise", FP8 | {"quantization": "compressed-tensors"}),
        represented("kv", GROUP, SMALL_GROUP),
        represented("kv-groups-in-another-order", SMALL_GROUP, GROUP),
        represented("kv-encoding-said", GROUP | {"encoding": "torch.bfloat16"}, SMALL_GROUP | {"element": "bf16"}),
        represented("kv-groups-by-resolved-names", GROUP | {"element": "float"}, GROUP | {"element": "fp16"}),
        represented("kv-fewer-groups", GROUP),
        represented("kv-another-layout", GROUP, SMALL_GROUP, layout="LBNHC"),
        represented("kv-another-packing", GROUP, SMALL_GROUP, packing="Attention:FLASH_ATTN:16:512"),
        represented("kv-fp8-e4m3", GROUP | {"element": "uint8", "encoding": "fp8"}),
        represented("kv-fp8-e5m2", GROUP | {"element": "uint8", "encoding": "fp8_e5m2"}),
        represented("kv-latent", GROUP | {"kind": "latent", "kv_heads": 1, "head_size": 576, "head_size_v": 512}),
        model("model-config"),
        model(
            "model-config-ignored-members",
            {"_name_or_path": "org/model", "num_hidden_layers": 16, "torch_dtype": "float16", "use_cache": False},
        ),
        model("model-config-nulls", {"rope_scaling": None}, {"remote_code": None}),
        model("model-config-another-base", {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
        model("model-config-window", {"sliding_window": 4096}),
        model("model-config-unknown-member", {"invented_field": {"on": True}}),
        model("model-config-null-items", {"layer_types": [None, {"kind": None, "head_dim": 64, "window": 128}]}),
        model("model-config-text-config", {"text_config": {"num_hidden_layers": 2, "hidden_size": 64}}),
        model("model-config-text-config-of-more-layers", {"text_config": {"num_hidden_layers": 3, "hidden_size": 64}}),
        model(
            "model-config-text-config-of-another-class", {"text_config": {"architectures": ["A"], "hidden_size": 64}}
        ),
        model("model-config-vision-config", {"vision_config": {"num_hidden_layers": 2}}),
        model("model-config-vision-config-of-more-layers", {"vision_config": {"num_hidden_layers": 3}}),
        model("model-config-another-class", resolved={"architecture": "LlamaModel"}),
        model("model-config-same-name-resolved", resolved={"hidden_size": 1024}),
        model(
            "model-config-longrope",
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "longrope"}},
            {"max_model_len": 131072},
        ),
        model("model-config-remote-code", {"auto_map": {"AutoConfig": "a.B"}}, {"remote_code": "00" * 32}),
        model("model-config-draft", resolved={"speculative_method": "eagle", "speculative_tokens": 4}),
        keyed("sharing_domain", "domain", "tenant-1"),
        keyed("sharing_domain", "domain-another-salt", "tenant-2"),
        keyed("sharing_domain", "domain-another-secret", "tenant-1", OTHER_SECRET, "2026-2"),
        keyed("sharing_domain", "domain-another-key-id", "tenant-1", SECRET, "2026-2"),
        keyed("sharing_domain", "domain-default-key-id", "tenant-1", SECRET, None),
        keyed("sharing_domain", "domain-without-secret", "tenant-1", None, None),
        half_a_pair("domain-half-a-surrogate-pair"),
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


def salt_of(case: Json) -> str:
    return bytes.fromhex(case["salt_hex"]).decode("utf-8", "surrogatepass") if "salt_hex" in case else case["salt"]


def known(case: Json) -> Known:
    match case["kind"]:
        case "precision":
            return precision(Precision(**case["facts"]))
        case "kv_representation":
            facts = case["facts"]
            return kv_representation(KvRepresentation(**facts | {"groups": [LayerGroup(**g) for g in facts["groups"]]}))
        case "model_config":
            return model_config(case["config"], case["resolved"])
        case "sharing_domain":
            return sharing_domain(salt_of(case), secret_of(case))
        case "client_namespace":
            return client_namespace(case["namespace"], secret_of(case))
    raise ValueError(case["kind"])


def identity(case: Json) -> str:
    match case["kind"]:
        case "tensors":
            return tensors_identity(digest_of(case["tensors"]))
        case "adapter":
            return adapter_identity(
                digest_of(case["tensors"]), case["config"], extra=case["engine"], files=case["files"]
            )
        case "config":
            return config_identity(json.loads(case["config_text"]) if "config_text" in case else case["config"])
    return known(case).identity


def text() -> str:
    # One vector a line.
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
