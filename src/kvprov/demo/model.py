"""Finds the bundled model and its reviews."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Final

from kvprov.demo.errors import DemoError

NAME: Final = "tiny-reviews"
NEEDED: Final = ("base/config.json", "base/model.safetensors", "base/tokenizer.json", "reviews.py", "adapters")
_HERE: Final = Path(__file__).resolve().parent
PLACES: Final = (_HERE / NAME, _HERE.parents[2] / "models" / NAME)
"""In an installed package, and in a checkout."""


@dataclass(frozen=True, slots=True)
class Review:
    """A prompt with the answer that the reader's policy wants."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The bundled model.

    Attributes:
        folder: Where it is.
    """

    folder: Path

    @property
    def base(self) -> Path:
        """The base model's folder."""
        return self.folder / "base"

    def adapter(self, source: str) -> Path:
        """Return the folder of one of its adapters.

        Raises:
            DemoError: There is no such adapter.
        """
        folder = self.folder / "adapters" / source
        if not (folder / "adapter_config.json").is_file():
            raise DemoError(
                f"The bundled model has no adapter {source!r}.", "Install kvprov again, or restore models/."
            )
        return folder

    def reviews(self, policy: str) -> list[Review]:
        """Return the evaluation reviews, with the answers that `policy` wants."""
        module = _load(self.folder / "reviews.py")
        return [Review(module.prompt(r), module.answer(r, policy)) for r in module.evaluation_reviews()]


class _Loader(SourceFileLoader):
    """Leaves no compiled file beside the source."""

    def set_data(self, *_args: Any, **_kwargs: Any) -> None:
        """Write nothing."""


def _load(path: Path) -> Any:
    name = "_kvprov_demo_reviews"
    spec = spec_from_loader(name, _Loader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find(places: tuple[Path, ...] = PLACES) -> Bundle:
    """Return the bundled model.

    Args:
        places: Where to look, best first.

    Raises:
        DemoError: It is in none of them.
    """
    for place in places:
        if all((place / needed).exists() for needed in NEEDED):
            return Bundle(place)
    looked = " and ".join(str(place) for place in places)
    raise DemoError(
        f"The demo's model {NAME} is not there, or not whole; looked in {looked}.",
        "Install kvprov from its wheel, or run the demo from a checkout that has the folder models/tiny-reviews.",
    )
