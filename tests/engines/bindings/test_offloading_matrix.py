"""OffloadingConnector's tiers against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import offloading

pytestmark = pytest.mark.engine


class TestOffloadingFs(BindingMatrix):
    opener = staticmethod(offloading.fs)
