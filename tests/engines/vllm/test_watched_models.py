"""What is noticed of weights that are given to a model itself."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvprov.engines.vllm.weights import count_direct_loads, direct_loads


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, weights: Any) -> set[str]:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)
        return {"weight"}


def test_each_load_counts_and_watching_twice_changes_nothing() -> None:
    model = Model()
    count_direct_loads(model)
    count_direct_loads(model)
    assert direct_loads(model) == 0
    assert model.load_weights([("weight", torch.ones(2))]) == {"weight"}
    assert direct_loads(model) == 1
    assert model.weight.tolist() == [1, 1]


def test_a_copy_of_a_model_is_a_model_of_its_own() -> None:
    model = Model()
    count_direct_loads(model)
    copied = copy.deepcopy(model)
    copied.load_weights([("weight", torch.ones(2))])
    assert (direct_loads(model), direct_loads(copied)) == (0, 1)
    assert model.weight.tolist() == [0, 0]
