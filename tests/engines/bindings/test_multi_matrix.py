"""MultiConnector against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import multi

pytestmark = pytest.mark.engine


class TestMulti(BindingMatrix):
    opener = staticmethod(multi.over_two)
