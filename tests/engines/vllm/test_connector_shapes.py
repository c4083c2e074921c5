"""Configurations of connectors, whatever their shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvprov.engines.vllm import connectors
from kvprov.errors import BindingError


def config(children: Any) -> Any:
    extra = {"connectors": children}
    return SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_module_path=None, kv_connector_extra_config=extra
    )


@pytest.mark.parametrize("kind", [list, tuple])
def test_children_count_in_either_kind_of_sequence(kind: Any) -> None:
    children = kind([{"kv_connector": "OffloadingConnector"}, {"kv_connector": "LMCacheConnectorV1"}])
    assert connectors.keyed_by_chain(config(children))
    assert connectors.reads_client_tags(config(children))
    nested = kind([{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}])
    assert connectors.keyed_by_chain(config(nested))


@pytest.mark.parametrize(
    "children",
    [
        "OffloadingConnector",
        {"kv_connector": "OffloadingConnector"},
        5,
        None,
        ["OffloadingConnector"],
        [None],
        [{}],
        [{"kv_connector": None}],
        [{"kv_connector": ["OffloadingConnector"]}],
        [{"kv_connector": "MultiConnector", "kv_connector_extra_config": "x"}],
    ],
    ids=str,
)
def test_other_shapes_are_refused_with_advice(children: Any) -> None:
    with pytest.raises(BindingError, match="cannot be read"):
        connectors.keyed_by_chain(config(children))
