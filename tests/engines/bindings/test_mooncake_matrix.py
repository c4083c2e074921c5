"""MooncakeStoreConnector against every dimension."""

import pytest

from tests.support.matrix import WITHOUT_CONFIGURATION, BindingMatrix
from tests.support.tiers import mooncake

pytestmark = pytest.mark.engine


class TestMooncake(BindingMatrix):
    opener = staticmethod(mooncake.store)
    plan = WITHOUT_CONFIGURATION
