"""ExampleConnector against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import example

pytestmark = pytest.mark.engine


class TestExample(BindingMatrix):
    opener = staticmethod(example.folder_store)
