"""An SGLang plugin that notes which keys HiCache asks its file backend for, and where.

It is installed as a distribution of its own, so it imports nothing of these tests.
"""

import functools
import json
import os

SWITCH = "TEST_KEYS"
"""Environment variable: the file to write to, a line of JSON for each call. Without it the plugin does nothing."""


def register():
    """Note the calls of this process. SGLang calls it in each of its processes."""
    path = os.environ.get(SWITCH)
    if path is None:
        return
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(site, keys):
        # One write of a whole line, from several threads.
        os.write(log, json.dumps([site, list(keys)]).encode() + b"\n")

    def noted(owner, name, site, keys_of):
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(self, *arguments, **keywords):
            result = original(self, *arguments, **keywords)
            note(site, keys_of(arguments, result))
            return result

        setattr(owner, name, wrapper)

    for name in ("batch_exists", "batch_exists_v2"):
        noted(HiCacheFile, name, "lookup", lambda arguments, _result: arguments[0])
    noted(HiCacheFile, "get", "read", lambda arguments, _result: [arguments[0]])
    noted(HiCacheFile, "set", "write", lambda arguments, _result: [arguments[0]])
    noted(HybridCacheController, "_storage_hit_query", "prefetch", lambda _arguments, result: result[0])
