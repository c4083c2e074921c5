"""The ledger: readable descriptors of the digests that workers use, for people who ask what a key was bound to.

A ledger is a folder or any fsspec URL. Workers write to it (`LedgerWriter`), `kvprov explain` reads it (`Ledger`).
Nothing in it takes part in a key: a record counts only when its descriptor encodes to its name, and a ledger that is
lost, full or forged changes no key and no hit.
"""

from kvprov.ledger.explain import Comparison, Side, compare
from kvprov.ledger.location import Location, shown_location
from kvprov.ledger.reader import Forged, Ledger
from kvprov.ledger.record import Record
from kvprov.ledger.resolve import Resolved, resolve
from kvprov.ledger.writer import LedgerWriter

__all__ = [
    "Comparison",
    "Forged",
    "Ledger",
    "LedgerWriter",
    "Location",
    "Record",
    "Resolved",
    "Side",
    "compare",
    "resolve",
    "shown_location",
]
