from __future__ import annotations

import json
import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import click
import pytest

import kvprov
from kvprov.cli.app import COMMANDS, cli
from kvprov.cli.failure import error_code, one_line
from kvprov.contract.document import DocumentError
from kvprov.errors import BindingError, SettingsError, UnreadableContentError
from tests.cli.support import VECTORS, environment, error_json, error_line, process, run, vectors

HEAVY = {"torch", "vllm", "rich", "jinja2", "blake3", "environ", "attr", "numpy", "importlib.metadata", "subprocess"}
IMPORTS = """
import sys
from kvprov.cli import main
try:
    main()
finally:
    print("MODULES", *sys.modules, file=sys.stderr)
"""


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_answers_at_once() -> None:
    # Time on the CPU, since the machine may have other work; nothing in here waits.
    times = []
    for _ in range(5):
        before = cpu_seconds()
        assert process("--help").returncode == 0
        times.append(cpu_seconds() - before)
    assert min(times) < 0.15, times


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["bogus"]])
def test_the_group_imports_nothing_heavy_and_no_command(args: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS, *args], capture_output=True, text=True)
    modules = set(done.stderr.rpartition("MODULES ")[2].split())
    assert "kvprov.cli.app" in modules
    assert not modules & HEAVY
    assert not modules & {command.module for command in COMMANDS.values()}


def test_importing_kvprov_imports_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import kvprov; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kvprov"]


def test_no_command_imports_an_engine_for_its_help() -> None:
    for name in COMMANDS:
        done = subprocess.run([sys.executable, "-c", IMPORTS, name, "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert not set(done.stderr.rpartition("MODULES ")[2].split()) & {"torch", "vllm", "rich", "jinja2"}


def test_help_names_commands_and_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    for name, command in COMMANDS.items():
        assert f"  {name}" in result.stdout
        assert command.summary in result.stdout
    for code in ("0", "1", "2", "3", "130", "141"):
        assert f"    {code} " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_help_that_begins_as_the_group_says(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Usage: kvprov {name} " in result.stdout
    assert COMMANDS[name].summary[:30] in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"kvprov {kvprov.__version__}\n"


def test_without_a_command_help_goes_to_stderr() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: kvprov")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--bogus"], "No such option"),
        (["bogus"], "No such command 'bogus'"),
        (["digest", "--bogus"], "See 'kvprov digest --help'."),
        (["digest"], "Missing argument 'FILE'"),
        (["digest", "no/such/file"], "No such file or directory"),
        (["digest", "--bits", "64", "-"], "'64' is not one of '256', '128'"),
        (["digest", "--json", "--hex", "-"], "leave out --hex"),
        (["digest", "--json", "--bits", "128", "-"], "leave out --hex and --bits"),
        (["identify"], "Missing argument 'PATH'"),
        (["identify", "a", "b"], "unexpected extra argument"),
        (["doctor", "extra"], "unexpected extra argument"),
        (["demo", "--output"], "requires an argument"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], says: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert says in error_line(result)
    assert re.search(r"[.?] See 'kvprov[a-z ]* --help'\.$", error_line(result))
    assert ".." not in error_line(result)


def test_usage_errors_are_json_when_json_is_wanted() -> None:
    result = run("digest", "no/such/file", "--json")
    assert result.exit_code == 2
    assert error_json(result)["code"] == "usage"
    error_line(result)


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [
        (SettingsError("Wrong.", "Mend it."), 2, "settings"),
        (UnreadableContentError("x", "it is broken", "Mend it."), 2, "unreadable_content"),
        (DocumentError("document", "it is broken"), 2, "document"),
        (BindingError("No engine.", "Install one."), 3, "binding"),
        (OSError(28, "No space left on device"), 2, "input_output"),
    ],
)
def test_errors_and_their_codes(
    error: Exception, exit_code: int, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: object, **options: object) -> NoReturn:
        raise error

    monkeypatch.setattr("kvprov.cli.identify.resolve_folder", fail)
    result = run("identify", tmp_path, "--json")
    assert result.exit_code == exit_code
    assert error_json(result)["code"] == code
    error_line(result)
    assert run("identify", tmp_path).stdout == ""


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(path: str) -> NoReturn:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvprov.cli.identify.resolve_folder", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("identify", tmp_path)


def test_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(path: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvprov.cli.identify.resolve_folder", interrupt)
    result = run("identify", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\nkvprov: interrupted.\n")


@pytest.mark.parametrize("args", [["digest", "-"], ["digest", "--json", "-"], ["doctor", "--no-engine"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error_to_complain_of(args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "kvprov.cli", *args],
        input=json.dumps(vectors("descriptors.json")[0]).encode(),
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_colours_on_a_terminal_only() -> None:
    main, other = pty.openpty()
    # TERM as a terminal has it, and nothing that forbids or forces colours.
    variables = {n: v for n, v in environment(TERM="xterm-256color").items() if n not in {"NO_COLOR", "FORCE_COLOR"}}
    command = [sys.executable, "-m", "kvprov.cli", "doctor", "--no-engine"]
    child = subprocess.Popen(command, stdout=other, stderr=subprocess.DEVNULL, env=variables)
    os.close(other)
    shown = b""
    try:
        while part := os.read(main, 65536):
            shown += part
    except OSError:
        # The terminal's other end is closed: all is read.
        pass
    finally:
        os.close(main)
    assert child.wait() == 0
    assert b"\x1b[" in shown
    assert "\x1b" not in run("doctor", "--no-engine").output


def test_the_installed_command_is_this_one() -> None:
    script = Path(sys.executable).with_name("kvprov")
    if not script.exists():
        pytest.skip("kvprov is not installed beside this Python")
    done = subprocess.run([script, "digest", VECTORS / "no-such-file"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvprov: ")


def test_one_line() -> None:
    assert one_line("a\nb \t c\x1b[2J\u202e") == "a b c\\x1b[2J\\u202e"


def test_error_code_of_the_contract() -> None:
    result = run("digest", "-", stdin=json.dumps(vectors("errors.json")[0]))
    assert result.exit_code == 2
    assert error_code(SettingsError("x")) == "settings"


def test_an_unknown_command_is_none() -> None:
    assert isinstance(cli, click.Group)
    assert cli.get_command(click.Context(cli), "__init__") is None
