from __future__ import annotations

import hashlib

from kvprov.identity import preimages
from kvprov.identity.canonical import canonical_json, config_identity


def test_what_an_identity_was_made_of_is_kept() -> None:
    config = {"b": 1.0, "a": [None, "x"]}
    identity = config_identity(config)
    kept = preimages.preimage_of(identity)
    assert kept == canonical_json(config)
    assert identity.endswith(hashlib.sha256(kept).hexdigest())
    assert preimages.preimage_of("config-v1-sha256:" + "0" * 64) is None


def test_memory_is_bounded() -> None:
    first = config_identity({"number": -1})
    last = [config_identity({"number": number}) for number in range(preimages.MAX_KEPT)][-1]
    assert preimages.preimage_of(first) is None
    assert preimages.preimage_of(last) is not None
    large = config_identity({"text": "x" * preimages.MAX_BYTES})
    assert preimages.preimage_of(large) is None


def test_what_is_used_again_stays() -> None:
    config = {"used": "again"}
    identity = config_identity(config)
    for number in range(2 * preimages.MAX_KEPT):
        config_identity({"other": number})
        config_identity(config)
    assert preimages.preimage_of(identity) is not None
