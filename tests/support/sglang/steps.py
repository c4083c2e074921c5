"""Steps that tests make an engine take. Nothing here imports kvprov: some engines run without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.sglang.engine import Answer, Engine


def generate(engine: Engine, **request: Any) -> list[Answer]:
    return engine.generate(**request)


def generate_or_none(engine: Engine, **request: Any) -> list[Answer] | None:
    """Like `generate`, and None where there is no answer in time."""
    try:
        return engine.generate(**request)
    except TimeoutError:
        return None


def flush(engine: Engine) -> None:
    engine.flush()


def written(engine: Engine, **expected: Any) -> int:
    return engine.wait_until_written(**expected)


def call(engine: Engine, *, method: str, **arguments: Any) -> Any:
    """Call a method of `engine` by its name."""
    return getattr(engine, method)(**arguments)


def stored(answers: Iterable[Answer]) -> int:
    return sum(answer.storage for answer in answers)
