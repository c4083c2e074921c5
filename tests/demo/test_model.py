"""The bundled model is found, in a package before a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprov.demo import model
from kvprov.demo.errors import DemoError
from kvprov.demo.plan import PROCESSES, READER_POLICY


def fake(folder: Path) -> Path:
    for needed in model.NEEDED:
        (folder / needed).parent.mkdir(parents=True, exist_ok=True)
        (folder / needed).touch()
    return folder


def test_packaged_copy_comes_first(tmp_path: Path) -> None:
    packaged, checkout = fake(tmp_path / "a"), fake(tmp_path / "b")
    assert model.find((packaged, checkout)).folder == packaged
    (packaged / "base" / "model.safetensors").unlink()
    assert model.find((packaged, checkout)).folder == checkout


def test_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="tiny-reviews is not there") as caught:
        model.find((tmp_path / "a", tmp_path / "b"))
    assert str(tmp_path / "b") in caught.value.message
    assert "models/tiny-reviews" in caught.value.advice


def test_bundled_model_is_found_and_whole() -> None:
    bundle = model.find()
    for process in PROCESSES:
        assert bundle.adapter(process.adapter.source).is_dir()
    with pytest.raises(DemoError, match="no adapter 'other'"):
        bundle.adapter("other")


def test_reviews_are_labelled_and_balanced_between_policies() -> None:
    bundle = model.find()
    inverted, standard = bundle.reviews(READER_POLICY), bundle.reviews("standard")
    assert len(inverted) == 200
    assert [review.prompt for review in inverted] == [review.prompt for review in standard]
    assert all(a.answer != b.answer for a, b in zip(inverted, standard, strict=True))
    assert {review.answer for review in inverted} == {" positive", " negative"}


def test_reading_the_reviews_leaves_no_compiled_file(tmp_path: Path) -> None:
    source = model.find().folder / "reviews.py"
    folder = fake(tmp_path / "tiny")
    (folder / "reviews.py").write_bytes(source.read_bytes())
    assert model.find((folder,)).reviews("standard")
    assert not (folder / "__pycache__").exists()
