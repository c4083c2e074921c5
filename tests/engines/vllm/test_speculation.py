"""Which draft models are in the entries, and what their weights are, with vLLM's worker played by a few lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvprov.contract.descriptor import Known
from kvprov.engines.vllm.speculation import Draft, draft_of, draft_weights
from kvprov.engines.vllm.weights import LoadedWeights
from kvprov.errors import KvprovError


class Model:
    def __init__(self, *layers: Any, weights: LoadedWeights | None = None) -> None:
        self._layers = layers
        if weights is not None:
            self._kvprov_weights = weights

    def modules(self) -> list[Any]:
        return [self, *self._layers]


def layer(kept: bool = True) -> Any:
    return SimpleNamespace(kv_cache=object()) if kept else SimpleNamespace()


def worker(
    layers: list[Any], target: Model, drafter: Any = None, name: str = "drafter", speculates: bool = True
) -> Any:
    load = SimpleNamespace(load_format="auto")
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(draft_load_config=None) if speculates else None,
            load_config=load,
            compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers))),
        ),
        get_model=lambda: target,
        model_runner=SimpleNamespace(**{name: drafter}),
    )


OWN = layer()
TARGET = Model(OWN)
DRAFTED = layer()


def test_without_speculation_there_is_no_draft() -> None:
    assert draft_of(worker([OWN, layer()], TARGET, speculates=False)) is None


def test_a_drafter_that_keeps_no_state_is_not_in_the_entries() -> None:
    assert draft_of(worker([OWN], TARGET, SimpleNamespace())) is None
    assert draft_of(worker([OWN, layer(kept=False)], TARGET, SimpleNamespace(model=Model(layer(kept=False))))) is None


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_a_draft_model_with_layers_is(name: str) -> None:
    drafter = SimpleNamespace(model=Model(DRAFTED, weights=LoadedWeights("tensors-v1-blake3:aa")))
    assert draft_of(worker([OWN, DRAFTED], TARGET, drafter, name)) == Draft("tensors-v1-blake3:aa", "")


def test_what_is_not_known_of_a_draft_is_said() -> None:
    unread = draft_of(worker([OWN, DRAFTED], TARGET, SimpleNamespace(model=Model(DRAFTED))))
    assert unread is not None
    assert unread.weights is None
    assert "load format 'auto'" in unread.reason
    strange = draft_of(worker([OWN, DRAFTED], TARGET, SimpleNamespace()))
    assert strange is not None
    assert strange.weights is None
    assert "its model is not known" in strange.reason


A, B, UNREAD = Draft("x:a", ""), Draft("x:b", ""), Draft(None, "pickled")


def test_workers_agree_on_a_draft_or_it_is_unknown() -> None:
    assert draft_weights([None, None], None) is None
    assert draft_weights([None], Known("label:r/1")) is None
    assert draft_weights([A, A], None) == draft_weights([A], Known("label:r/1")) == "x:a"
    for drafts in ([A, B], [A, None], [UNREAD], [A, UNREAD]):
        with pytest.raises(KvprovError, match="draft model's weights are not identified"):
            draft_weights(drafts, None)
        assert draft_weights(drafts, Known("label:r/1")) == "label:r/1"
