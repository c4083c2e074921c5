from __future__ import annotations

from pathlib import Path

import pytest

from kvprov.errors import UnidentifiableError, UnreadableContentError
from kvprov.identity.remote_code import remote_code

CONFIG = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoTokenizer": ["tok_x.Slow", None]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "configuration_x.py").write_text("class XConfig: ...\n")
    (model / "helper.py").write_text("A = 1\n")
    return model


def test_none_is_asked_for(folder: Path) -> None:
    assert remote_code(str(folder), None, {}) is None
    assert remote_code(str(folder), None, {"auto_map": {}}) is None


def test_it_goes_by_content_of_every_python_file(folder: Path, tmp_path: Path) -> None:
    first = remote_code(str(folder), None, CONFIG)
    assert first is not None
    moved = folder.rename(tmp_path / "moved")
    assert remote_code(str(moved), None, CONFIG) == first
    (moved / "README.md").write_text("not code")
    assert remote_code(str(moved), None, CONFIG) == first
    (moved / "helper.py").write_text("A = 2\n")
    second = remote_code(str(moved), None, CONFIG)
    assert second != first
    (moved / "helper.py").rename(moved / "helper2.py")
    assert remote_code(str(moved), None, CONFIG) not in {first, second}


def test_code_from_elsewhere_is_not_known(folder: Path) -> None:
    with pytest.raises(UnidentifiableError, match="another repository"):
        remote_code(str(folder), None, {"auto_map": {"AutoModel": "somebody/else--modeling.X"}})


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableContentError):
        remote_code(str(tmp_path / "missing"), None, CONFIG)
