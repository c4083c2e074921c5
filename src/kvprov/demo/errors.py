"""The demo's own error."""

from kvprov.errors import KvprovError


class DemoError(KvprovError):
    """The demo could not be run, so it says nothing about any claim."""
