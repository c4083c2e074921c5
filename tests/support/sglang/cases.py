"""Cases in which an engine finds entries of another provenance: a writer and a reader that must not meet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.sglang.coarse import NAME as COARSE
from tests.support.sglang.coarse import SWITCH as COARSE_BITS

TENANT = "tenant"
"""The adapter's name. Its folder, and the checkpoint's, are the same in every engine."""
PREFIX = 2048
"""Tokens of a prefix, at least."""
WAIT, BEST_EFFORT, TIMEOUT = POLICIES = ("wait_complete", "best_effort", "timeout")
DIMENSIONS = (
    "adapter",
    "weights",
    "precision",
    "model_config",
    "kv_representation",
    "sharing_domain",
    "client_namespace",
)


@dataclass(frozen=True)
class Worker:
    """How an engine is configured.

    Attributes:
        name: For messages.
        args: Values of SGLang's `ServerArgs`.
        env: Environment variables.
        adapter: The policy whose bytes are in the adapter's folder.
        weights: Whether the checkpoint's folder holds the `first` weights or the `second`.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    adapter: str = "standard"
    weights: str = "first"

    def __hash__(self) -> int:
        return hash(self.name)


FIRST = Worker("first")
REPLACED = Worker("adapter replaced", adapter="inverted")
UPDATED = Worker("weights replaced", weights="second")
QUANTIZED = Worker("quantized", {"quantization": COARSE}, {COARSE_BITS: "2"})
FLOAT16 = Worker("float16", {"dtype": "float16"})
FLOAT32 = Worker("float32", {"dtype": "float32"})
ROTARY = Worker(
    "rotary base",
    {"json_model_override_args": json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})},
)
FP8_KV = Worker("fp8 KV", {"kv_cache_dtype": "fp8_e5m2"})


@dataclass(frozen=True)
class Case:
    """A writer and a reader that must not meet.

    Attributes:
        name: What differs.
        dimensions: The dimensions that it belongs to, and that are withheld to open it.
        reads: The reader.
        writes: The writer.
        ask: What the reader asks beside the prompt.
        written_as: What the writer asked beside it, where that differs.
        policy: When the reader's requests stop waiting for the store, where that matters.
        withheld: Whether it is opened, too.
    """

    name: str
    dimensions: tuple[str, ...]
    reads: Worker = FIRST
    writes: Worker = FIRST
    ask: Mapping[str, str] = field(default_factory=dict)
    written_as: Mapping[str, str] | None = None
    policy: str | None = None
    withheld: bool = True

    @property
    def label(self) -> str:
        return self.name if self.policy is None else f"{self.name}, {self.policy}"

    @property
    def computational(self) -> bool:
        """Whether state differs, and not only who may have it."""
        return self.dimensions[0] not in ("sharing_domain", "client_namespace")

    @property
    def exchanges(self) -> bool:
        """Whether the reader finds other files at the paths that the writer read."""
        return (self.reads.weights, self.reads.adapter) != (self.writes.weights, self.writes.adapter)

    def __hash__(self) -> int:
        return hash(self.label)


ELEMENT_TYPE = ("precision", "kv_representation")
OWN = Case("own state", ())
"""The control: nothing differs."""
ADAPTER = Case("adapter replaced in place", ("adapter",), REPLACED, ask={"adapter": TENANT})
WEIGHTS = Case("weight version", ("weights",), UPDATED)
PRECISION = Case("weight precision", ("precision",), QUANTIZED)
ROTARY_BASE = Case("rotary base", ("model_config",), ROTARY)
HALF = Case("element type bfloat16, read as float16", ELEMENT_TYPE, FLOAT16)
SINGLE = Case("element type bfloat16, read as float32", ELEMENT_TYPE, FLOAT32, withheld=False)
OTHER_SALT = Case("salt X, read with salt Y", ("sharing_domain",), ask={"salt": "Y"}, written_as={"salt": "X"})
NO_SALT = Case("salt X, read without a salt", ("sharing_domain",), ask={}, written_as={"salt": "X"})
NEW_SALT = Case("no salt, read with salt X", ("sharing_domain",), ask={"salt": "X"}, written_as={})
NAMESPACE = Case(
    "extra_key E, read with extra_key F", ("client_namespace",), ask={"extra_key": "F"}, written_as={"extra_key": "E"}
)
NARROW_KV = [
    Case("KV dtype bfloat16, read as fp8_e5m2", ("kv_representation",), FP8_KV, policy=policy, withheld=policy == WAIT)
    for policy in POLICIES
]
WIDE_KV = [
    Case("KV dtype fp8_e5m2, read as bfloat16", ("kv_representation",), FIRST, FP8_KV, policy=policy, withheld=False)
    for policy in POLICIES
]
PROBES = (OTHER_SALT, NAMESPACE)
"""They stay closed while other dimensions are withheld."""
