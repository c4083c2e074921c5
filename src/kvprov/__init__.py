"""kvprov binds provenance into every key of a shared KV cache.

Importing this package imports no engine and no tensor library. The contract is in `kvprov.contract`, content
identities in `kvprov.identity`, what each engine needs in `kvprov.engines`.
"""

__version__ = "0.1.0"
