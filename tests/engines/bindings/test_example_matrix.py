"""ExampleConnector against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import example

pytestmark = [pytest.mark.engine, pytest.mark.smoke]


class TestExample(BindingMatrix):
    opener = staticmethod(example.folder_store)
