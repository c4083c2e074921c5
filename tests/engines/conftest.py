"""Fixtures of the tests that run real engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.matrix import References, make_references
from tests.support.models import Models, loadable
from tests.support.processes import ENVIRONMENT, Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    before = dict(os.environ)
    # The fork server takes its environment from here, at its start.
    os.environ.update(ENVIRONMENT, KVPROV_CACHE_DIR=str(tmp_path_factory.mktemp("digest-cache")))
    yield Processes(tmp_path_factory.mktemp("logs"))
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def references(processes: Processes, models: Models, tmp_path_factory: pytest.TempPathFactory) -> References:
    """What engines answer that share nothing."""
    return make_references(processes, models, tmp_path_factory.mktemp("references"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def prompts(models: Models) -> list[list[int]]:
    """A few prompts, for tests that need no more."""
    return models.prompts(4)


@pytest.fixture(scope="session")
def full(prompts: list[list[int]]) -> int:
    """How many tokens of `prompts` a warm store gives."""
    return sum(loadable(len(prompt)) for prompt in prompts)
