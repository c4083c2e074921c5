"""OffloadingConnector's obj tier against every dimension."""

import pytest

from tests.support.matrix import ANOTHER_STORE, BindingMatrix
from tests.support.tiers import offloading

pytestmark = pytest.mark.engine


class TestOffloadingObj(BindingMatrix):
    opener = staticmethod(offloading.obj)
    withheld = ANOTHER_STORE
