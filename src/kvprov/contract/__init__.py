"""The provenance contract: pure, standard library only, no input or output.

`key = bind(f(x), H(enc(p)), path facts)`: what is here turns a registry and a descriptor `p` into the digest
`H(enc(p))` and its text. The normative text is `spec/kv-provenance-v1.md`.
"""

from kvprov.contract.descriptor import ABSENT, Absent, Descriptor, Known, Unknown, Value
from kvprov.contract.digest import Digester, digest, worker_digest
from kvprov.contract.dimension import Dimension, Half, Kind
from kvprov.contract.encoding import encode
from kvprov.contract.errors import ContractError, ErrorCode, KvprovError
from kvprov.contract.key import DigestBits, chain_entry, content_identifier, key_text, nonce
from kvprov.contract.registry import Registry

__all__ = [
    "ABSENT",
    "Absent",
    "ContractError",
    "Descriptor",
    "DigestBits",
    "Digester",
    "Dimension",
    "ErrorCode",
    "Half",
    "Kind",
    "Known",
    "KvprovError",
    "Registry",
    "Unknown",
    "Value",
    "chain_entry",
    "content_identifier",
    "digest",
    "encode",
    "key_text",
    "nonce",
    "worker_digest",
]
