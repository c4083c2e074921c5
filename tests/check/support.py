"""The bundled model, and key functions with one fault each.

They are here by name, so that the process that a check starts can import them.
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

from kvprov.check import Case
from kvprov.contract import Known
from kvprov.contract.dimension import Half
from kvprov.identity.checkpoint import select_files

MODEL = Path(__file__).parents[2] / "models" / "tiny-reviews"
BASE = MODEL / "base"
ADAPTERS = (MODEL / "adapters" / "standard", MODEL / "adapters" / "inverted")

COMPUTATIONAL = {"weights", "precision", "model_config", "kv_representation", "adapter"}
PERMISSION = {"sharing_domain", "client_namespace"}


def sha(*parts: object) -> str:
    """Return a hash that sees where parts end."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def identities(case: Case, *without: str) -> list[tuple[str, str]]:
    """Return what kvprov would bind, less the dimensions that a fault is about."""
    halves = {Half.WORKER: case.descriptor.worker, Half.REQUEST: case.descriptor.request}
    return [
        (name, value.identity if isinstance(value, Known) else "")
        for half in Half
        for name, value in sorted(halves[half].items())
        if name not in without
    ]


def sound(case: Case) -> str:
    return sha(case.tokens, identities(case))


def tensors(folder: Path) -> dict[str, bytes]:
    """Return an adapter's tensors, as bytes with dtype and shape."""
    import torch
    from safetensors.torch import load_file

    loaded = sorted(load_file(folder / "adapter_model.safetensors").items())
    return {name: repr((t.dtype, t.shape)).encode() + t.view(torch.uint8).numpy().tobytes() for name, t in loaded}


def adapter_config(case: Case) -> str:
    return "" if case.adapter is None else (case.adapter / "adapter_config.json").read_text()


def drops_the_third_tensor(case: Case) -> str:
    kept = [] if case.adapter is None else list(tensors(case.adapter).items())
    del kept[2:3]
    return sha(case.tokens, identities(case, "adapter"), kept, adapter_config(case))


def drops_names_of_tensors(case: Case) -> str:
    kept = [] if case.adapter is None else sorted(tensors(case.adapter).values())
    return sha(case.tokens, identities(case, "adapter"), kept, adapter_config(case))


def drops_the_adapters_configuration(case: Case) -> str:
    kept = [] if case.adapter is None else list(tensors(case.adapter).items())
    return sha(case.tokens, identities(case, "adapter"), kept)


def of_16_bits(case: Case) -> str:
    return sound(case)[:4]


def adapter_of_16_bits(case: Case) -> str:
    adapter = dict(identities(case))["adapter"]
    return sha(case.tokens, identities(case, "adapter"), sha(adapter)[:4])


def on_the_path(case: Case) -> str:
    return sha(case.tokens, str(case.model), str(case.adapter), identities(case, "adapter", "weights"))


def on_the_path_and_times(case: Case) -> str:
    stamps = []
    for path in (*select_files(case.model), *([] if case.adapter is None else sorted(case.adapter.iterdir()))):
        status = path.stat()
        stamps.append((str(path), status.st_size, status.st_mtime_ns))
    return sha(case.tokens, stamps, identities(case, "adapter", "weights"))


def on_the_name(case: Case) -> str:
    return sha(case.tokens, case.model.name, case.adapter_name, identities(case, "adapter", "weights"))


def joins_without_lengths(case: Case) -> str:
    worker = identities(case, "sharing_domain", "client_namespace")
    text = f"{case.salt or ''}{case.namespace or ''}"
    return hashlib.sha256(f"{case.tokens}{worker}{text}".encode()).hexdigest()


def joins_identities(case: Case) -> str:
    text = "".join(identity for _, identity in identities(case))
    return hashlib.sha256(f"{case.tokens};{text}".encode()).hexdigest()


def joins_named_identities(case: Case) -> str:
    text = ",".join(f"{name}={identity}" for name, identity in identities(case))
    return hashlib.sha256(f"{case.tokens};{text}".encode()).hexdigest()


def joins_tokens_and_salt(case: Case) -> str:
    data = b"".join(token.to_bytes(8, "little") for token in case.tokens)
    worker = sha(identities(case, "sharing_domain"), case.salt is None)
    return worker + hashlib.sha256(data + (case.salt or "").encode()).hexdigest()


def joins_adapter_and_salt(case: Case) -> str:
    rest = identities(case, "sharing_domain")
    return sha(case.tokens, rest, case.salt is None) + f"/{case.adapter_name}-{case.salt or ''}"


def takes_none_for_a_text(case: Case) -> str:
    return sha(case.tokens, identities(case, "sharing_domain"), f"{case.salt}")


def never_shares(case: Case) -> str:
    return f"{sound(case)}-{uuid.uuid4()}"


_HANDLE = uuid.uuid4()


def differs_by_process(case: Case) -> str:
    return sha(sound(case), str(_HANDLE) if case.adapter is not None else "")


def knows_only_whether_there_is_an_adapter(case: Case) -> str:
    return sha(case.tokens, identities(case, "adapter"), case.adapter is None)


def fails(case: Case) -> str:
    raise LookupError(f"no rank for {case.adapter_name}")


def returns_a_number(case: Case) -> int:
    return 7
