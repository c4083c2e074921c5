from __future__ import annotations

from pathlib import Path

import pytest

import kvprov.demo
from tests.cli.support import error_line, run


@pytest.mark.parametrize(("result", "exit_code"), [(0, 0), (1, 1), (2, 3), (130, 130)])
def test_the_demo_is_run(result: int, exit_code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []

    def demonstrate(output: Path) -> int:
        calls.append(output)
        return result

    monkeypatch.setattr(kvprov.demo, "run", demonstrate)
    assert run("demo").exit_code == exit_code
    assert run("demo", "--output", tmp_path).exit_code == exit_code
    assert calls == [Path("build/demo"), tmp_path]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def demonstrate(output: Path) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(kvprov.demo, "run", demonstrate)
    result = run("demo")
    assert result.exit_code == 3
    assert "pip install" in error_line(result)


def test_output_must_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = run("demo", "--output", file)
    assert result.exit_code == 2
    assert "is a file" in error_line(result)


@pytest.mark.parametrize("name", ["file/below", "file/below/again"])
def test_output_that_cannot_be_created_is_a_usage_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kvprov.demo, "run", lambda output: pytest.fail("it was run"))
    (tmp_path / "file").touch()
    result = run("demo", "--output", tmp_path / name)
    assert result.exit_code == 2
    assert "cannot be created: Not a directory. See 'kvprov demo --help'." in error_line(result)
    assert run("demo", "--output", "/dev/null/x").exit_code == 2
    assert run("demo", "--output", "/dev/null").exit_code == 2
