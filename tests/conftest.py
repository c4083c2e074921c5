"""What holds for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Its tests are inherited by the modules that name a tier.
pytest.register_assert_rewrite("tests.support.matrix")

# How long a draw takes says more about a shared machine than about the test.
settings.register_profile("kvprov", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvprov")
