"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long a draw takes says more about a shared machine than about the test.
settings.register_profile("kvprov", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvprov")
