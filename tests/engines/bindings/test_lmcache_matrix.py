"""LMCache's in-process form against every dimension."""

import pytest

from tests.support.matrix import ANOTHER_STORE, BindingMatrix
from tests.support.tiers import lmcache

pytestmark = pytest.mark.engine


class TestLMCacheDisk(BindingMatrix):
    opener = staticmethod(lmcache.disk)


class TestLMCacheRemote(BindingMatrix):
    opener = staticmethod(lmcache.lm)
    withheld = ANOTHER_STORE


class TestLMCacheRedis(BindingMatrix):
    opener = staticmethod(lmcache.redis)
    withheld = ANOTHER_STORE
