"""Tables of the documents are those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvprov.settings import NAMES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_bindings_table", ROOT / "scripts" / "make_bindings_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_connectors_is_the_codes(script: ModuleType) -> None:
    text = (ROOT / "docs" / "bindings.md").read_text()
    assert script.replaced(text, script.CONNECTORS, script.connectors()) == text


def test_the_table_of_sglangs_paths_is_the_codes(script: ModuleType) -> None:
    text = (ROOT / "docs" / "bindings.md").read_text()
    assert script.replaced(text, script.PATHS, script.sglang_paths()) == text


def test_every_setting_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []
