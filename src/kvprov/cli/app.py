"""The command group. Its help imports no command, so that it answers at once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Final

import click

import kvprov
from kvprov.cli.failure import reported


@dataclass(frozen=True, slots=True)
class _Command:
    """Where a command is, and what the group's help says of it: in plain sight, so that help imports no command."""

    module: str
    summary: str


COMMANDS: Final = {
    "audit": _Command("kvprov.cli.audit", "Find what the keys of each connector leave out."),
    "check": _Command("kvprov.cli.check", "Find what changes KV state and not the key."),
    "demo": _Command("kvprov.cli.demo", "Show foreign state being served, and kvprov preventing it."),
    "digest": _Command("kvprov.cli.digest", "Print the digest of a registry and a descriptor."),
    "doctor": _Command("kvprov.cli.doctor", "Say whether engines started here would be protected."),
    "explain": _Command("kvprov.cli.explain", "Say what a key was bound to, and what separates two."),
    "identify": _Command("kvprov.cli.identify", "Print the identity of a checkpoint or an adapter."),
    "store": _Command("kvprov.cli.store", "Compare stores that workers have written."),
}

EPILOG: Final = """\b
Exit codes:
  0    fine
  1    something is unsafe, or a claim does not hold
  2    usage or input error: bad arguments, unreadable content, contract error
  3    an engine is not available, or failed
  4    the check cannot judge: its positive control fails
  130  interrupted
  141  whoever read the output went away
"""


class _Group(click.Group):
    """Loads a command when it is used, and reports every error in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name].module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with reported(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        with reported(ctx):
            return super().invoke(ctx)


@click.group(
    cls=_Group,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(kvprov.__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Bind provenance into every key of a shared KV cache, and check that it is bound.

    With --json (--json - where it takes a file) a command writes JSON alone to stdout; an error is
    {"error": {"code", "message", "advice"}}.
    """
    if ctx.invoked_subcommand is None:
        # On stderr and with an error's code: a script whose variable was empty must not go on as if all were well.
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
