from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprov.contract import ABSENT, ContractError, Dimension, Half, Kind
from kvprov.contract.dimensions import BUILT_IN, NOT_BOUND
from kvprov.errors import SettingsError
from kvprov.extensions import Extension, load_extensions, registry_with

MODULE = """
from kvprov.contract import ABSENT, Dimension, Half, Kind
from kvprov.extensions import Extension
def make(name, half=Half.REQUEST):
    return Extension(Dimension(name, half, Kind.COMPUTATIONAL, "a test"), lambda _: ABSENT)
rope = make("acme.rope_patch", Half.WORKER)
tier = make("acme.tier")
bare = make("bare")
number = 7
"""

Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package with the given entry points."""

    def install(points: dict[str, str]) -> None:
        (tmp_path / "acme_dimensions.py").write_text(MODULE)
        metadata = tmp_path / "acme-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {target}" for name, target in points.items())
        (metadata / "entry_points.txt").write_text(f"[kvprov.dimensions]\n{lines}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_dimensions", raising=False)

    return install


def test_none_are_installed() -> None:
    assert load_extensions() == ()
    assert registry_with(()) == BUILT_IN


def test_installed_ones_join_the_registry_by_name(install: Install) -> None:
    install({"z": "acme_dimensions:rope", "a": "acme_dimensions:tier"})
    extensions = load_extensions()
    assert [extension.dimension.name for extension in extensions] == ["acme.rope_patch", "acme.tier"]
    registry = registry_with(extensions)
    assert "acme.rope_patch" in registry.worker
    assert "acme.tier" in registry.request
    assert len(registry) == len(BUILT_IN) + 2


@pytest.mark.parametrize(
    ("points", "what"),
    [
        ({"a": "acme_dimensions:bare"}, "has no prefix"),
        ({"a": "acme_dimensions:number"}, "is not a kvprov Extension"),
        ({"a": "acme_dimensions:missing"}, "cannot be loaded"),
        ({"a": "acme_missing:rope"}, "cannot be loaded"),
        ({"a": "acme_dimensions:tier", "b": "acme_dimensions:tier"}, "two entry points"),
    ],
)
def test_broken_ones_are_refused(install: Install, points: dict[str, str], what: str) -> None:
    install(points)
    with pytest.raises(SettingsError, match=what) as caught:
        load_extensions()
    assert caught.value.advice


def test_withholding() -> None:
    assert set(BUILT_IN.worker) - set(registry_with((), ("weights",)).worker) == {"weights"}
    with pytest.raises(ContractError, match="wieghts"):
        registry_with((), ("wieghts",))


def test_an_extension_cannot_replace_a_built_in() -> None:
    extension = Extension(Dimension("adapter", Half.REQUEST, Kind.COMPUTATIONAL, ""), lambda _: ABSENT)
    with pytest.raises(ContractError, match="registered twice"):
        registry_with((extension,))


def test_every_dimension_says_why_and_so_does_every_exclusion() -> None:
    assert all(dimension.why for dimension in BUILT_IN)
    assert all(NOT_BOUND.values())
    assert not set(NOT_BOUND) & {dimension.name for dimension in BUILT_IN}
