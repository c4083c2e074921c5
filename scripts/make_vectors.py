"""Writes the test vectors in spec/vectors from kvprov.contract. Running it again changes nothing.

python scripts/make_vectors.py            write the files
python scripts/make_vectors.py --check    fail if a file is not what would be written
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvprov.contract import ContractError, ErrorCode
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.document import evaluate, parse_document

VECTORS: Final = Path(__file__).resolve().parents[1] / "spec" / "vectors"

Json: TypeAlias = dict[str, Any]
Values: TypeAlias = dict[str, str | None]
"""Text is a known identity, None is absent."""

ABSENT: Final[Json] = {"state": "absent"}
UNKNOWN: Final[Json] = {"state": "unknown"}


def known(identity: str) -> Json:
    return {"state": "known", "identity": identity}


def states(values: Values) -> Json:
    return {name: ABSENT if identity is None else known(identity) for name, identity in values.items()}


def content(scheme: str, label: str) -> str:
    """Return an identity that looks like a content identity; vectors need no real content."""
    return f"{scheme}:{hashlib.sha256(label.encode()).hexdigest()}"


def domain(salt: str, key_id: str | None = "2026-1", tag: str = "kv-domain/1") -> str:
    """Return the identity of a sharing domain (specification, section 4.5) under the secrets of the vectors."""
    message = b"".join(len(text).to_bytes(8, "big") + text.encode() for text in (tag, salt))
    if key_id is None:
        scheme, digest = "sha256", hashlib.sha256(message).digest()
    else:
        scheme, digest = f"hmac-sha256.{key_id}", hmac.digest(SECRETS[key_id], message, "sha256")
    return f"{scheme}:{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


SECRETS: Final = {"2026-1": b"0123456789abcdef0123456789abcdef", "2026-2": b"fedcba9876543210fedcba9876543210"}
WORKER: Final[Values] = {
    "weights": content("tensors-v1-blake3", "weights 1"),
    "precision": content("config-v1-sha256", "bfloat16"),
    "model_config": content("config-v1-sha256", "llama"),
    "kv_representation": content("config-v1-sha256", "kv bfloat16"),
}
REQUEST_NAMES: Final = ["sharing_domain", "adapter"]
BASE: Final[Values] = {"adapter": None, "sharing_domain": None, "client_namespace": None}
ADAPTER_A: Final = content("adapter-v1-blake3", "adapter A")
ADAPTER_B: Final = content("adapter-v1-blake3", "adapter B")
TENANT_1: Final = domain("tenant-1")
TENANT_2: Final = domain("tenant-2")


def built_in(worker: Values | None = None, request: Values | None = None, drop: Iterable[str] = ()) -> Json:
    """Return a document of the built-in registry, with some values replaced and some dimensions withheld."""
    halves = {"worker": WORKER | (worker or {}), "request": BASE | (request or {})}
    kept = {half: {n: v for n, v in values.items() if n not in drop} for half, values in halves.items()}
    return document(kept["worker"], kept["request"])


def document(worker: Values, request: Values, registry: tuple[list[str], list[str]] | None = None) -> Json:
    """Return a document whose registry has the descriptor's names, or those of `registry`."""
    names = registry or (list(worker), list(request))
    return raw(names, (states(worker), states(request)))


def raw(registry: tuple[list[str], list[str]], descriptor: tuple[Json, Json]) -> Json:
    return {
        "registry": dict(zip(("worker", "request"), registry, strict=True)),
        "descriptor": dict(zip(("worker", "request"), descriptor, strict=True)),
    }


def valid_documents() -> dict[str, Json]:
    """Return the documents that have a digest, by name."""
    printable = "".join(map(chr, range(0x21, 0x7F)))
    border = ["a", "a.b", "a1", "a_b", "ab"]
    values: Values = {name: f"label:{index}" for index, name in enumerate(border)}
    backwards: Values = dict(reversed(values.items()))
    return {
        # The example of the specification, section 3.5
        "worked-example": document(
            {"weights": "label:run-7/3"}, {"adapter": "label:a/1", "sharing_domain": None}, (["weights"], REQUEST_NAMES)
        ),
        # The registry and its halves
        "empty-registry": document({}, {}),
        "empty-worker-half": document({}, {"adapter": "label:x"}),
        "empty-request-half": document({"adapter": "label:x"}, {}),
        "built-in-names-are-these": raw(
            (list(BUILT_IN.worker), list(BUILT_IN.request)),
            (dict.fromkeys(BUILT_IN.worker, ABSENT), dict.fromkeys(BUILT_IN.request, ABSENT)),
        ),
        # Realistic requests
        "built-in-base": built_in(),
        "built-in-adapter-a": built_in(request={"adapter": ADAPTER_A}),
        "built-in-adapter-b": built_in(request={"adapter": ADAPTER_B}),
        "built-in-tenant-1": built_in(request={"sharing_domain": TENANT_1}),
        "built-in-tenant-2": built_in(request={"sharing_domain": TENANT_2}),
        "built-in-adapter-a-tenant-1": built_in(request={"adapter": ADAPTER_A, "sharing_domain": TENANT_1}),
        "built-in-client-namespace": built_in(request={"client_namespace": domain("tenant-1", tag="kv-namespace/1")}),
        "built-in-all-known": built_in(
            request={
                "adapter": ADAPTER_A,
                "sharing_domain": TENANT_1,
                "client_namespace": domain("chat", tag="kv-namespace/1"),
            }
        ),
        "built-in-other-weights": built_in({"weights": content("tensors-v1-blake3", "weights 2")}),
        "built-in-labelled-weights": built_in({"weights": "label:rl-run-7/step-1200"}),
        "built-in-other-precision": built_in({"precision": content("config-v1-sha256", "fp8_per_channel")}),
        "built-in-other-model-config": built_in({"model_config": content("config-v1-sha256", "rope theta 1e6")}),
        "built-in-other-kv": built_in({"kv_representation": content("config-v1-sha256", "kv fp8_e4m3")}),
        "built-in-precision-and-kv-swapped": built_in(
            {"precision": WORKER["kv_representation"], "kv_representation": WORKER["precision"]}
        ),
        "built-in-nonce-adapter": built_in(request={"adapter": "nonce:00112233445566778899aabbccddeeff"}),
        "built-in-rotated-secret": built_in(request={"sharing_domain": domain("tenant-1", "2026-2")}),
        "built-in-unkeyed-domain": built_in(request={"sharing_domain": domain("tenant-1", None)}),
        # Another registry is another epoch, even when the dimension added is absent everywhere
        "epoch-extra-worker-dimension-absent": built_in({"acme.rope_patch": None}),
        "epoch-extra-worker-dimension-known": built_in({"acme.rope_patch": "label:on"}),
        "epoch-extra-request-dimension-absent": built_in(request={"acme.rope_patch": None}),
        "epoch-without-adapter": built_in(drop=["adapter"]),
        "epoch-without-sharing-domain": built_in(drop=["sharing_domain"]),
        # Near collisions between dimensions
        "adapter-x": document({}, {"adapter": "label:x", "sharing_domain": None}),
        "domain-x": document({}, {"adapter": None, "sharing_domain": "label:x"}),
        "adapter-x-domain-x": document({}, {"adapter": "label:x", "sharing_domain": "label:x"}),
        "both-absent": document({}, {"adapter": None, "sharing_domain": None}),
        "values-p-q": document({}, {"adapter": "label:p", "sharing_domain": "label:q"}),
        "values-q-p": document({}, {"adapter": "label:q", "sharing_domain": "label:p"}),
        # Identities shifted across the border of a field
        "border-xy-z": document({}, {"a": "s:xy", "b": "s:z"}),
        "border-x-yz": document({}, {"a": "s:x", "b": "s:yz"}),
        "border-xyz-alone": document({}, {"a": "s:xyz", "b": None}),
        "border-alone-xyz": document({}, {"a": None, "b": "s:xyz"}),
        "border-name-takes-a-letter": document({}, {"ab": "s:x"}),
        "border-identity-takes-a-letter": document({}, {"a": "bs:x"}),
        "border-scheme-long": document({}, {"a": "s.t:u:v"}),
        "border-scheme-short": document({}, {"a": "s:t:u:v"}),
        # Text that looks like structure
        "value-spells-absent": document({}, {"a": "absent:absent"}),
        "value-spells-zero": document({}, {"a": "s:00"}),
        "value-spells-the-encoding": document({}, {"a": "s:kv-provenance/1", "b": "kv-provenance:1"}),
        "name-is-a-scheme": document({}, {"a": "label:b", "label": "a:label"}),
        "name-is-a-half": document({"request": "s:worker", "worker": "s:request"}, {}),
        "name-is-a-half-other-half": document({}, {"request": "s:worker", "worker": "s:request"}),
        # Halves: the same values on the other side, and across the border between them
        "halves-a-then-b": document({"a": "s:x"}, {"b": "s:y"}),
        "halves-b-then-a": document({"b": "s:y"}, {"a": "s:x"}),
        "halves-both-worker": document({"a": "s:x", "b": "s:y"}, {}),
        "halves-both-request": document({}, {"a": "s:x", "b": "s:y"}),
        # Names: dots, underscores and digits in byte order; the order of registration does not matter
        "order-of-names": document({}, values),
        "order-of-names-registered-backwards": document({}, backwards, ([], border[::-1])),
        "order-dots-in-worker-half": document({"x.a": None, "x_a": None, "x1": None, "x.a.0": None, "x.0": None}, {}),
        "name-one-letter-last": document({"z": None}, {}),
        "name-long": document({"a" * 200 + "." + "b" * 99: "s:x"}, {}),
        "name-digit-after-dot": document({"acme.2d_rope": "s:x", "acme._private": "s:x"}, {}),
        "many-dimensions": document({f"d{index:03}": None for index in range(257)}, {}),
        # Identities at their limits
        "identity-shortest": document({}, {"a": "s:x"}),
        "identity-payload-is-a-colon": document({}, {"a": "s::"}),
        "identity-payload-has-colons": document({}, {"a": "s:x:y::z:"}),
        "identity-1024-bytes": document({}, {"a": "s:" + "x" * 1022}),
        "identity-1023-bytes": document({}, {"a": "s:" + "x" * 1021}),
        "identity-every-printable": document({}, {"a": f"s:{printable}"}),
        "identity-scheme-punctuation": document({}, {"a": "hmac-sha256.k-2026.1-:x"}),
        "identity-payload-case-upper": document({}, {"a": "label:X"}),
        "identity-payload-case-lower": document({}, {"a": "label:x"}),
        "identity-scheme-longest": document({}, {"a": "s" * 1022 + ":x"}),
    }


def _one(identity: str) -> Json:
    return document({}, {"a": identity})


def invalid_documents() -> dict[str, tuple[ErrorCode, Json]]:
    """Return the documents that have no digest, by name, each with the code of the rule that is checked first."""
    a_absent = {"a": ABSENT}
    bad_names = {
        "empty": "",
        "upper-case": "Weights",
        "starts-with-digit": "1a",
        "starts-with-underscore": "_a",
        "starts-with-dot": ".a",
        "ends-with-dot": "a.",
        "doubled-dot": "a..b",
        "hyphen": "kv-representation",
        "slash": "acme/rope",
        "colon": "a:b",
        "space": "a b",
        "trailing-newline": "a\n",
        "nul": "a\u0000",
        "accent": "caf\u00e9",
        "cyrillic-a": "\u0430dapter",
        "kelvin-sign": "\u212av",
        "arabic-digit": "a\u0661",
        "upper-case-after-dot": "acme.Rope",
    }
    bad_identities = {
        "empty": "",
        "no-colon": "abc",
        "only-colon": ":",
        "empty-scheme": ":x",
        "empty-payload": "s:",
        "upper-case-scheme": "SHA256:00",
        "mixed-case-scheme": "sHa256:00",
        "scheme-starts-with-digit": "9s:x",
        "scheme-starts-with-hyphen": "-s:x",
        "scheme-underscore": "a_b:x",
        "scheme-space": "s :x",
        "leading-space": " s:x",
        "payload-space": "s:x y",
        "payload-tab": "s:x\ty",
        "trailing-newline": "s:x\n",
        "control-character": "s:\u0001",
        "nul": "s:\u0000",
        "delete": "s:\u007f",
        "no-break-space": "s:x\u00a0y",
        "payload-accent": "s:caf\u00e9",
        "payload-emoji": "s:\U0001f600",
        "scheme-accent": "\u00e9:x",
        "full-width-colon": "s\uff1ax",
        "1025-bytes": "s:" + "x" * 1023,
        "1024-characters-more-bytes": "s:" + "\u00e9" * 1022,
    }
    bad_name, bad_identity, doubled = ErrorCode.BAD_NAME, ErrorCode.BAD_IDENTITY, ErrorCode.DOUBLED_DIMENSION
    missing, unregistered = ErrorCode.MISSING_DIMENSION, ErrorCode.UNREGISTERED_DIMENSION
    unknown = ErrorCode.UNKNOWN_VALUE
    found: dict[str, tuple[ErrorCode, Json]] = {
        "unknown-worker": (unknown, raw((["a"], []), ({"a": UNKNOWN}, {}))),
        "unknown-request": (unknown, raw(([], ["a"]), ({}, {"a": UNKNOWN}))),
        "unknown-with-reason": (unknown, raw(([], ["a"]), ({}, {"a": UNKNOWN | {"reason": "the file is gone"}}))),
        "unknown-beside-known": (unknown, raw(([], ["a", "b"]), ({}, {"a": known("s:x"), "b": UNKNOWN}))),
        "unknown-in-both-halves": (unknown, raw((["a"], ["b"]), ({"a": UNKNOWN}, {"b": UNKNOWN}))),
        "missing-worker": (missing, raw((["a"], []), ({}, {}))),
        "missing-request": (missing, raw(([], ["a"]), ({}, {}))),
        "missing-one-of-two": (missing, raw(([], ["a", "b"]), ({}, {"b": known("s:x")}))),
        "unregistered-worker": (unregistered, raw(([], []), (a_absent, {}))),
        "unregistered-request": (unregistered, raw(([], []), ({}, a_absent))),
        "unregistered-beside-registered": (unregistered, raw(([], ["a"]), ({}, {"a": ABSENT, "b": ABSENT}))),
        "unregistered-in-that-half": (unregistered, raw(([], ["a"]), (a_absent, a_absent))),
        "registered-in-the-other-half": (missing, raw((["a"], []), ({}, a_absent))),
        "doubled-worker": (doubled, raw((["a", "a"], []), (a_absent, {}))),
        "doubled-request": (doubled, raw(([], ["a", "b", "a"]), ({}, {"a": ABSENT, "b": ABSENT}))),
        "doubled-across-halves": (doubled, raw((["a"], ["a"]), (a_absent, a_absent))),
        # Which rule is checked first
        "order-bad-name-before-doubled": (bad_name, raw((["a", "a"], ["A"]), (a_absent, {"A": ABSENT}))),
        "order-doubled-before-bad-descriptor-name": (doubled, raw((["a", "a"], []), ({"A": ABSENT}, {}))),
        "order-bad-descriptor-name-before-bad-identity": (bad_name, raw(([], []), ({"a": known("x")}, {"A": ABSENT}))),
        "order-bad-identity-before-missing": (bad_identity, raw((["a"], ["b"]), ({}, {"b": known("x")}))),
        "order-bad-identity-before-unknown": (bad_identity, raw((["a"], ["b"]), ({"a": UNKNOWN}, {"b": known("x")}))),
        "order-missing-before-unregistered": (missing, raw((["a"], []), ({"b": ABSENT}, {}))),
        "order-unregistered-before-unknown": (unregistered, raw((["a"], []), ({"a": UNKNOWN, "b": ABSENT}, {}))),
        "order-worker-unknown-before-request-missing": (unknown, raw((["a"], ["b"]), ({"a": UNKNOWN}, {}))),
        "order-worker-unregistered-before-request-missing": (unregistered, raw(([], ["b"]), (a_absent, {}))),
    }
    for why, name in bad_names.items():
        found[f"bad-name-{why}"] = (bad_name, raw(([], [name]), ({}, {name: ABSENT})))
    found["bad-name-in-registry-worker"] = (bad_name, raw((["A"], []), ({}, {})))
    found["bad-name-in-descriptor-only"] = (bad_name, raw(([], []), ({}, {"A": ABSENT})))
    for why, identity in bad_identities.items():
        found[f"bad-identity-{why}"] = (bad_identity, _one(identity))
    found["bad-identity-in-worker"] = (bad_identity, document({"a": "x"}, {}))
    return found


def build_descriptors() -> list[Json]:
    """Return the contents of descriptors.json."""
    vectors = []
    for name, source in valid_documents().items():
        found = evaluate(*parse_document(json.dumps(source)))
        results = {
            "enc_hex": found.enc.hex(),
            "digest_hex": found.digest.hex(),
            "worker_digest_hex": found.worker_digest.hex(),
            "text": found.text,
            "text_128": found.text_128,
        }
        vectors.append({"name": name} | source | results)
    return vectors


def build_errors() -> list[Json]:
    """Return the contents of errors.json.

    Raises:
        AssertionError: kvprov.contract reports another code than the one meant.
    """
    vectors = []
    for name, (code, source) in invalid_documents().items():
        try:
            evaluate(*parse_document(json.dumps(source)))
        except ContractError as error:
            if error.code is not code:
                raise AssertionError(f"{name}: {error.code} instead of {code}") from error
        else:
            raise AssertionError(f"{name}: has a digest")
        vectors.append({"name": name} | source | {"error": code.value})
    return vectors


FILES: Final[dict[str, Callable[[], list[Json]]]] = {
    "descriptors.json": build_descriptors,
    "errors.json": build_errors,
}


def render(vectors: list[Json]) -> str:
    """Return JSON with one member a line, so that a difference between two versions can be read."""
    blocks = (
        "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in vector.items()) + "\n}"
        for vector in vectors
    )
    return "[\n" + ",\n".join(blocks) + "\n]\n"


def main(arguments: list[str]) -> int:
    stale = 0
    for file, build in FILES.items():
        path, text = VECTORS / file, render(build())
        if path.exists() and path.read_text(encoding="ascii") == text:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"{path.name} is not what kvprov.contract gives; run scripts/make_vectors.py", file=sys.stderr)
        else:
            VECTORS.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
            print(f"wrote {path.name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
