"""A second implementation of the content identities, from the specification's text. It shares no code with kvprov."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import struct
from decimal import Decimal
from typing import Any

from blake3 import blake3


def prefixed(data: bytes) -> bytes:
    return struct.pack(">Q", len(data)) + data


def tensors_digest(tensors: list[dict[str, Any]]) -> bytes:
    """Tensors are `{"name", "dtype", "shape", "data_hex"}`."""
    out = bytearray(prefixed(b"kv-tensors/1") + struct.pack(">Q", len(tensors)))
    for tensor in sorted(tensors, key=lambda t: bytes(t["name"], "utf-8")):
        out += prefixed(bytes(tensor["name"], "utf-8")) + prefixed(bytes(tensor["dtype"], "ascii"))
        out += struct.pack(f">I{len(tensor['shape'])}Q", len(tensor["shape"]), *tensor["shape"])
        out += blake3(bytes.fromhex(tensor["data_hex"])).digest()
    return blake3(bytes(out)).digest()


def _number(value: int | float) -> str:
    """ECMAScript's Number::toString, from the shortest decimal digits that read back as the same double."""
    if value == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    assert isinstance(exponent, int)
    s = "".join(map(str, digits))
    k, n = len(s), len(s) + exponent
    if k <= n <= 21:
        text = s + "0" * (n - k)
    elif 0 < n <= 21:
        text = s[:n] + "." + s[n:]
    elif -6 < n <= 0:
        text = "0." + "0" * -n + s
    else:
        text = s[0] + ("." + s[1:] if k > 1 else "") + "e" + ("+" if n > 0 else "-") + str(abs(n - 1))
    return "-" * sign + text


def canonical(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        name = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        return '{"$float":"' + name + '"}'
    if isinstance(value, int | float):
        big = isinstance(value, int) and abs(value) >= 2**53
        if big and (abs(value) >= 2**1024 - 2**970 or int(float(value)) != value):
            return '{"$int":"' + hex(int(value)) + '"}'
        return _number(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(canonical, value)) + "]"
    renamed = {("$" + name if name[:1] == "$" else name): item for name, item in value.items()}
    names = sorted(renamed, key=lambda name: name.encode("utf-16-be"))
    return "{" + ",".join(canonical(name) + ":" + canonical(renamed[name]) for name in names) + "}"


def config_identity(value: Any) -> str:
    return "config-v1-sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()


def effective(config: dict[str, Any]) -> dict[str, Any]:
    never = [
        *("base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "task_type", "auto_mapping"),
        *("peft_version", "megatron_config", "megatron_core", "runtime_config"),
    ]
    init = config.get("init_lora_weights")
    if init in (None, True, False) or str(init).lower() in ("gaussian", "orthogonal", "eva"):
        never += ["init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"]
    defaults = {"peft_type": '"LORA"', "bias": '"none"', "r": "8", "lora_alpha": "8", "qalora_group_size": "16"}
    false = ["fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias", "ensure_weight_tying"]
    defaults |= dict.fromkeys(false, "false")
    result = {}
    for name, value in config.items():
        if name in ("rank_pattern", "alpha_pattern"):
            value = [[key, item] for key, item in (value or {}).items()] or None
        if name in ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform") and isinstance(
            value, list
        ):
            value = [json.loads(text) for text in sorted({canonical(item) for item in value}, key=str.encode)]
        if name not in never and canonical(value) != defaults.get(name, "null"):
            result[name] = value
    return result


def adapter_identity(
    tensors: list[dict[str, Any]], config: dict[str, Any], engine: dict[str, Any], files: dict[str, str]
) -> str:
    bound = effective(config)
    if engine:
        bound["kvprov:engine"] = engine
    if files:
        bound["kvprov:files"] = files
    preimage = prefixed(b"kv-adapter/1") + tensors_digest(tensors) + prefixed(canonical(bound).encode())
    return "adapter-v1-blake3:" + blake3(preimage).hexdigest()


def element_type(name: str) -> str:
    name = name.removeprefix("torch.").lower()
    assert name not in ("auto", "none", "")
    for one, others in {
        "float16": ["half", "fp16", "f16"],
        "bfloat16": ["bf16"],
        "float32": ["float", "fp32", "f32"],
        "float64": ["double"],
        "fp8_e4m3": ["fp8", "float8_e4m3fn"],
        "fp8_e5m2": ["float8_e5m2"],
    }.items():
        if name in others:
            return one
    return name


def precision(facts: dict[str, Any]) -> str:
    resolved = dict(facts)
    if resolved["adapter_dtype"] is None:
        resolved["adapter_dtype"] = resolved["compute_dtype"]
    for member in ("weight_dtype", "compute_dtype", "adapter_dtype"):
        resolved[member] = element_type(resolved[member])
    if resolved["quantization"] is None:
        resolved["parameters"] = {}
    return config_identity(resolved)


def kv_representation(facts: dict[str, Any]) -> str:
    members = ("kind", "layers", "element", "encoding", "kv_heads", "head_size", "head_size_v")
    groups = []
    for group in facts["groups"]:
        assert set(group) == set(members)
        element = element_type(group["element"])
        encoding = element if group["encoding"] == "auto" else element_type(group["encoding"])
        groups.append(group | {"element": element, "encoding": encoding})
    groups.sort(key=lambda group: [bytes(str(group[member]), "utf-8") for member in members])
    return config_identity(facts | {"groups": groups})


NO_PART = (
    *("dtype", "torch_dtype", "quantization_config", "compression_config"),
    *("num_key_value_heads", "num_hidden_layers", "head_dim"),
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
    *("_attn_implementation", "_attn_implementation_internal", "attn_implementation"),
    "architectures",
    *("attention_dropout", "embd_pdrop", "gradient_checkpointing", "hidden_dropout"),
    *("pretraining_tp", "resid_pdrop"),
    *("chunk_size_feed_forward", "finetuning_task", "id2label", "label2id"),
    *("output_attentions", "output_hidden_states", "problem_type", "return_dict"),
    *("task_specific_params", "tokenizer_class", "use_cache"),
)


# Read by their owner at the top level; the second row also in the top level's text_config.
AT_THE_TOP = ("architectures", "quantization_config", "compression_config")
IN_THE_LANGUAGE_MODEL = ("dtype", "torch_dtype", "num_key_value_heads", "num_hidden_layers", "head_dim")


def without_ignored(value: Any, where: tuple[str, ...] = ()) -> Any:
    if isinstance(value, list):
        return [without_ignored(item, (*where, "[]")) for item in value]
    if isinstance(value, dict):
        bound: tuple[str, ...] = ()
        if where:
            bound = AT_THE_TOP if where == ("text_config",) else AT_THE_TOP + IN_THE_LANGUAGE_MODEL
        kept = {n: item for n, item in value.items() if item is not None and (n not in NO_PART or n in bound)}
        return {name: without_ignored(item, (*where, name)) for name, item in kept.items()}
    return value


def model_config(config: dict[str, Any], resolved: dict[str, Any]) -> str:
    return config_identity({"config": without_ignored(config), "resolved": without_ignored(resolved)})


def keyed(tag: str, value: bytes, secret: str | None, key_id: str | None) -> str:
    """`secret` is hex."""
    message = prefixed(tag.encode()) + prefixed(value)
    if secret is None:
        return "sha256:" + base64.urlsafe_b64encode(hashlib.sha256(message).digest()).decode().strip("=")
    key = bytes.fromhex(secret)
    if key_id is None:
        key_id = hashlib.sha256(prefixed(b"kv-key-id/1") + prefixed(key)).hexdigest()[:8]
    mac = hmac.new(key, message, hashlib.sha256).digest()
    return f"hmac-sha256.{key_id}:" + base64.urlsafe_b64encode(mac).decode().strip("=")


def sharing_domain(salt: bytes, secret: str | None, key_id: str | None) -> str:
    return keyed("kv-domain/1", salt, secret, key_id)


def client_namespace(value: bytes, secret: str | None, key_id: str | None) -> str:
    return keyed("kv-namespace/1", value, secret, key_id)
