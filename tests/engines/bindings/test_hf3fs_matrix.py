"""HF3FSKVConnector against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import hf3fs

pytestmark = pytest.mark.engine


class TestHF3FS(BindingMatrix):
    opener = staticmethod(hf3fs.files)
