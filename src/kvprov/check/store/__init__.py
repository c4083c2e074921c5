"""Comparing two stores, or two snapshots of one: which keys hold different bytes in each.

Two workers that write different state under one key would serve each other's. So a key that both stores have, with
other bytes in each, is a collision: the key leaves out what the two workers differ in.
"""

from kvprov.check.store.check import Fleet, StoreCheck, Worker, check_stores
from kvprov.check.store.diff import StoreDiff, diff_stores
from kvprov.check.store.entries import Store
from kvprov.check.store.formats import FORMATS, Format

__all__ = [
    "FORMATS",
    "Fleet",
    "Format",
    "Store",
    "StoreCheck",
    "StoreDiff",
    "Worker",
    "check_stores",
    "diff_stores",
]
