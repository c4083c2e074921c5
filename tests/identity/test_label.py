from __future__ import annotations

import pytest

from kvprov.errors import SettingsError
from kvprov.identity import label


@pytest.mark.parametrize("text", ["run-7/3", "a/b", "Grpo_2025.07/step=1200+ema@x", f"{'r' * 255}/{'v' * 255}"])
def test_a_label_is_an_identity(text: str) -> None:
    assert label(text).identity == f"label:{text}"


@pytest.mark.parametrize(
    "text",
    ["", "run", "/3", "run/", "a/b/c", "a b/c", "a/b\n", "é/1", "../x", "a/.", "label:a/b", f"{'r' * 256}/1", "a\\b/c"],
)
def test_refuses_what_is_none(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a label") as caught:
        label(text)
    assert "RUN/VERSION" in caught.value.advice
