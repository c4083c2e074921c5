"""Running the command, in this process and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kvprov.cli.app import cli

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "spec" / "vectors"
MODEL = ROOT / "models" / "tiny-reviews"


def run(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    """Run the command in this process. A bug in it is raised, rather than made an exit code."""
    result = CliRunner().invoke(cli, [str(arg) for arg in args], input=stdin, prog_name="kvprov")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def process(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "kvprov.cli", *map(str, args)]
    return subprocess.run(command, text=True, capture_output=True, **options)


def error_line(result: Result) -> str:
    """Return the one line on stderr that an error is reported in."""
    assert result.stderr.startswith("kvprov: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr


def error_json(result: Result) -> dict[str, str]:
    """Return the error that is on stdout, alone."""
    loaded = json.loads(result.stdout)
    assert loaded.keys() == {"error"}
    assert loaded["error"].keys() == {"code", "message", "advice"}
    return dict(loaded["error"])


def vectors(file: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((VECTORS / file).read_text(encoding="ascii"))
    return loaded


def install(folder: Path, name: str, groups: Mapping[str, Sequence[str]] | None = None, **modules: str) -> Path:
    """Write an installed package as pip leaves one, with entry points and modules; `folder` must be on sys.path."""
    info = folder / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    points = [f"[{group}]\n" + "\n".join(lines) for group, lines in (groups or {}).items()]
    (info / "entry_points.txt").write_text("\n".join(points) + "\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables`, for a process of its own."""
    return {**os.environ, **variables}
