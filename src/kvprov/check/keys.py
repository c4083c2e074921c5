"""Key functions: kvprov's own bound key, the key of tokens alone, and somebody's own by name."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from kvprov.check.case import Case
from kvprov.check.errors import CheckError
from kvprov.contract.encoding import u64

KeyFunction: TypeAlias = Callable[[Case], str | bytes]
"""From a request to the key of its entry in the store."""

BOUND: Final = "bound"
CONTENT_ONLY: Final = "content-only"


def content_only(case: Case) -> str:
    """Return a key of the prompt's tokens alone, as content-addressed connectors derive theirs."""
    return hashlib.sha256(b"".join(map(u64, case.tokens))).hexdigest()


def bound(case: Case) -> str:
    """Return the content-only key, bound to provenance as kvprov binds it.

    Raises:
        ContractError: A value is not known: such a request would bypass the tier.
    """
    return f"{content_only(case)}-{case.bound}"


BUILT_IN: Final[Mapping[str, KeyFunction]] = {BOUND: bound, CONTENT_ONLY: content_only}


def key_function(name: str) -> KeyFunction:
    """Return a key function by name: `bound`, `content-only`, or one to import, as in `acme_kv.keys:key`.

    Modules are looked for in the current folder, too.

    Raises:
        CheckError: There is no such function.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    advice = f"Name {BOUND}, {CONTENT_ONLY}, or a function that can be imported, as in acme_kv.keys:key."
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    if not module or not path:
        raise CheckError(f"{name!r:.200} is no key function.", advice)
    # A command has its own folder there instead, and a connector's author runs it beside the code.
    if os.getcwd() not in sys.path:  # noqa: PTH109 - as sys.path holds it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: object = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckError(f"The key function {name!r:.200} cannot be imported: {error}.", advice) from error
    if not callable(found):
        raise CheckError(f"{name!r:.200} is a {type(found).__name__}, no function.", advice)
    return found


def evaluate(key: KeyFunction, case: Case) -> bytes:
    """Return the key of one case, as bytes.

    Raises:
        CheckError: The function fails, or returns anything else than text or bytes.
    """
    try:
        found = key(case)
    except CheckError:
        raise
    except Exception as error:
        # Code of others, which may raise anything.
        raise CheckError(
            f"The key function failed with {type(error).__name__}: {error}.",
            "Run it with a debugger on the case of the traceback, or with `kvprov check` as a library.",
        ) from error
    if isinstance(found, str):
        return found.encode("utf-8", "surrogatepass")
    if isinstance(found, bytes):
        return found
    raise CheckError(
        f"The key function returned a {type(found).__name__}.", "Return the key as text or bytes, as the store has it."
    )
