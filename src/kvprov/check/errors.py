"""Errors of the checker."""

from __future__ import annotations

from kvprov.errors import KvprovError


class CheckError(KvprovError):
    """A check that cannot be made as it was asked for: a model, a space or a key function that cannot be used."""


class MissingPackageError(KvprovError):
    """A package that the check needs is not installed."""
