"""Fixtures of the tests that run real SGLang engines. They run in the environments that `make setup-sglang` makes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.processes import Processes, environment

# vLLM's environment has no SGLang.
collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    before = dict(os.environ)
    # The fork server takes its environment from here, at its start.
    os.environ.update(environment(), KVPROV_CACHE_DIR=str(tmp_path_factory.mktemp("digest-cache")))
    yield Processes(tmp_path_factory.mktemp("logs"))
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> LongModels:
    return LongModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def prompts(models: LongModels) -> list[list[int]]:
    """One prompt of more than 2,048 tokens."""
    return models.long_prompts(1)


@pytest.fixture(scope="session")
def full(prompts: list[list[int]]) -> int:
    """How many tokens of `prompts` a warm store gives, with the usual pages."""
    return sum(loadable(len(prompt)) for prompt in prompts)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder
