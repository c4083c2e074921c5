"""MooncakeStoreConnector against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import mooncake

pytestmark = pytest.mark.engine


class TestMooncake(BindingMatrix):
    opener = staticmethod(mooncake.store)
