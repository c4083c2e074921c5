"""What the workers of `kvprov store check` serve, and the documents that they write."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvprov.errors import UnreadableContentError
from kvprov.identity.files import open_file
from kvprov.identity.strict_json import parse_object

DOCUMENTS: Final = 3
DOCUMENT_TOKENS: Final = 100
MAX_CONFIG_BYTES: Final = 8 << 20
ROPE: Final[Mapping[str, Any]] = {"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}}
"""What workers that differ in `model_config` have in their configuration."""


@dataclass(frozen=True, slots=True)
class Model:
    """What workers serve, and how.

    Attributes:
        folder: Of the checkpoint.
        adapters: Two adapters, whose bytes take turns at one path; or None for workers without one.
        weights: Another checkpoint of this architecture, for an engine whose workers can differ in it; or None for the
            same one with noise on its tensors.
        arguments: More of what the engine is told, for every worker.
    """

    folder: Path
    adapters: tuple[Path, Path] | None = None
    weights: Path | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_object(path: Path) -> dict[str, object]:
    """Read a configuration.

    Raises:
        UnreadableContentError: It is not there, or no JSON object.
    """
    with open_file(path) as file:
        return parse_object(file.read_all(MAX_CONFIG_BYTES), path)


def documents(model: Path) -> list[list[int]]:
    """Return prompts of a model's own tokens, the same at each call.

    Raises:
        UnreadableContentError: The model has no readable configuration, or no vocabulary.
    """
    config = read_object(model / "config.json")
    words = config.get("vocab_size")
    if not isinstance(words, int) or words < 2:
        raise UnreadableContentError(model / "config.json", "it names no vocab_size", "Name a text model's folder.")
    source = random.Random(0)
    return [[source.randrange(1, words) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)]
