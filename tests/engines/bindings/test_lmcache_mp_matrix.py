"""LMCache's server form against every dimension."""

import pytest

from tests.support.matrix import ANOTHER_STORE, BindingMatrix, Matrix
from tests.support.tiers import lmcache_mp

pytestmark = pytest.mark.engine


class LMCacheMpMatrix(BindingMatrix):
    def reopens(self, matrix: Matrix, name: str) -> bool:
        # What stands in the model's place in keys says of what type an entry's elements are.
        return name != "kv_representation" and super().reopens(matrix, name)


class TestLMCacheMpFs(LMCacheMpMatrix):
    opener = staticmethod(lmcache_mp.fs)


class TestLMCacheMpRedis(LMCacheMpMatrix):
    opener = staticmethod(lmcache_mp.redis)
    withheld = ANOTHER_STORE
