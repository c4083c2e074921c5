"""An SGLang plugin that closes the gaps of a CPU: SGLang takes for granted what only accelerators have.

It is installed as a distribution of its own (see plugins.py), so it imports nothing of these tests.
"""

import functools
import sys
import types

FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "empty_like", "zeros_like", "empty_strided")
"""Functions of torch that take `pin_memory`."""


def register():
    """Take effect in this process. SGLang calls it in each of its processes."""
    _do_without_pinned_memory()
    _copy_pages_with_torch()
    _allocate_pages_with_torch()
    _stand_in_for_vllm()


def _do_without_pinned_memory():
    """Host memory is pinned for transfers to a device; without a device, torch refuses."""
    import torch

    def without_pinning(function):
        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            keywords.pop("pin_memory", None)
            return function(*arguments, **keywords)

        return wrapper

    for name in FACTORIES:
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_arguments, **_keywords: tensor

    # The host's pool registers its memory with CUDA itself.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.__init__",
        lambda *arguments, **keywords: (arguments, keywords | {"pin_memory": False}),
        HookType.BEFORE,
    )


def _copy_pages_with_torch():
    """HiCache moves pages between its levels with a kernel of sgl-kernel, which has no CPU build."""
    import sglang.srt.mem_cache.pool_host.mha as pool

    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, target in zip(src_layers, dst_layers, strict=True):
            target.index_copy_(0, dst_indices.long(), source.index_select(0, src_indices.long()))

    pool.transfer_kv_direct = transfer_kv_direct


def _allocate_pages_with_torch():
    """0.5.20 chooses the places of tokens in pages with kernels of Triton, which has no CPU driver."""
    import sglang.srt.mem_cache.allocator.paged as allocator
    import torch

    if hasattr(allocator, "alloc_decode_naive"):
        return  # This release has what it needs.

    class Launch:
        """What `kernel[grid](...)` calls."""

        def __init__(self, function):
            self._function = function

        def __getitem__(self, _grid):
            return self._function

    def extend(prefix_lens, seq_lens, last_loc, free_pages, out, _batch, page_size):
        allocator.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)

    def decode(seq_lens, last_loc, free_pages, out, _batch, page_size):
        begins_page = (seq_lens - 1) % page_size == 0
        # The caller gives up by itself when there are too few pages.
        place = (torch.cumsum(begins_page, 0) - 1).clamp(0, max(len(free_pages) - 1, 0))
        begin = free_pages[place] * page_size if len(free_pages) else last_loc + 1
        out.copy_(torch.where(begins_page, begin, last_loc + 1))

    allocator.alloc_extend_kernel, allocator.alloc_decode_kernel = Launch(extend), Launch(decode)


def _stand_in_for_vllm():
    """The layer of rotary embeddings imports a kernel of vLLM's for every CPU that lacks AMX. It is never called."""

    def rotary_embedding(*_arguments, **_keywords):
        raise NotImplementedError("a kernel of vLLM was called, and tests have only a stand-in for it")

    package, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    package.__path__ = []
    package._custom_ops = operators
    operators.rotary_embedding = rotary_embedding
    sys.modules.setdefault("vllm", package)
    sys.modules.setdefault("vllm._custom_ops", operators)
