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
    tensors: list[dict[str, Any]], config: dict[str, Any], extra: dict[str, Any], files: dict[str, str]
) -> str:
    bound = effective(config)
    if extra:
        bound["kvprov:engine"] = extra
    if files:
        bound["kvprov:files"] = files
    preimage = prefixed(b"kv-adapter/1") + tensors_digest(tensors) + prefixed(canonical(bound).encode())
    return "adapter-v1-blake3:" + blake3(preimage).hexdigest()


def keyed(tag: str, value: str, secret: str | None, key_id: str | None) -> str:
    """`secret` is hex."""
    message = prefixed(tag.encode()) + prefixed(value.encode("utf-8", "surrogatepass"))
    if secret is None:
        return "sha256:" + base64.urlsafe_b64encode(hashlib.sha256(message).digest()).decode().strip("=")
    key = bytes.fromhex(secret)
    if key_id is None:
        key_id = hashlib.sha256(prefixed(b"kv-key-id/1") + prefixed(key)).hexdigest()[:8]
    mac = hmac.new(key, message, hashlib.sha256).digest()
    return f"hmac-sha256.{key_id}:" + base64.urlsafe_b64encode(mac).decode().strip("=")


def sharing_domain(salt: str, secret: str | None, key_id: str | None) -> str:
    return keyed("kv-domain/1", salt, secret, key_id)


def client_namespace(value: str, secret: str | None, key_id: str | None) -> str:
    return keyed("kv-namespace/1", value, secret, key_id)
