"""LMCache's in-process form against every dimension."""

import pytest

from tests.support.matrix import BindingMatrix
from tests.support.tiers import lmcache

pytestmark = pytest.mark.engine


class TestLMCacheDisk(BindingMatrix):
    opener = staticmethod(lmcache.disk)


class TestLMCacheRemote(BindingMatrix):
    opener = staticmethod(lmcache.lm)


class TestLMCacheRedis(BindingMatrix):
    opener = staticmethod(lmcache.redis)
