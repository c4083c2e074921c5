"""MultiConnector against every dimension."""

import pytest

from tests.support.matrix import WITHOUT_CONFIGURATION, BindingMatrix
from tests.support.tiers import multi

pytestmark = pytest.mark.engine


class TestMulti(BindingMatrix):
    opener = staticmethod(multi.over_two)
    plan = WITHOUT_CONFIGURATION
