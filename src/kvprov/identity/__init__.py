"""Content to identity: checkpoints, adapters, configurations, sharing domains.

Importing this package imports no tensor library, no engine, and none of the heavier libraries (hashing, progress bars):
these are imported where they are used.
"""

from kvprov.identity.adapter import (
    Pinned,
    adapter_identity,
    identify_adapter,
    pin_adapter,
    sources_unchanged,
    unpin_adapter,
)
from kvprov.identity.adapter_config import IGNORED_FIELDS, effective_config
from kvprov.identity.canonical import canonical_json, config_identity
from kvprov.identity.checkpoint import (
    Identified,
    OpenCheckpoint,
    combined_identity,
    identify_checkpoint,
    open_checkpoint,
    open_files,
    resolve_folder,
    select_files,
)
from kvprov.identity.digest_cache import DigestCache, default_cache
from kvprov.identity.domain import FleetSecret, client_namespace, load_secret, sharing_domain
from kvprov.identity.files import OpenFile, Stamp, open_file
from kvprov.identity.label import label
from kvprov.identity.progress import Progress, SilentProgress, rich_progress
from kvprov.identity.safetensors import TensorSpan, read_header
from kvprov.identity.tensors import Tensor, hash_file, tensors_digest, tensors_identity

__all__ = [
    "IGNORED_FIELDS",
    "DigestCache",
    "FleetSecret",
    "Identified",
    "OpenCheckpoint",
    "OpenFile",
    "Pinned",
    "Progress",
    "SilentProgress",
    "Stamp",
    "Tensor",
    "TensorSpan",
    "adapter_identity",
    "canonical_json",
    "client_namespace",
    "combined_identity",
    "config_identity",
    "default_cache",
    "effective_config",
    "hash_file",
    "identify_adapter",
    "identify_checkpoint",
    "label",
    "load_secret",
    "open_checkpoint",
    "open_file",
    "open_files",
    "pin_adapter",
    "read_header",
    "resolve_folder",
    "rich_progress",
    "select_files",
    "sharing_domain",
    "sources_unchanged",
    "tensors_digest",
    "tensors_identity",
    "unpin_adapter",
]
