"""Lets torchvision be imported next to a CPU build of torch.

An import of SGLang's needs torchvision, whose wheel is a CUDA build: its C extension does not load here, and the
operators that it would declare are looked up while torchvision is imported. So they are declared, without a kernel,
just before. Setting up the environment copies this file into it, with a `.pth` file that imports it in every process.
"""

import sys
from importlib.abc import MetaPathFinder


class _DeclareOperators(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        """Find nothing: only notice that torchvision is about to be imported."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # The schemas last as long as this object does.
            kept.append(library)


kept = []
sys.meta_path.insert(0, _DeclareOperators())
