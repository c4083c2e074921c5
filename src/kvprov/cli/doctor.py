"""`kvprov doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from kvprov.cli.failure import ENGINE, UNSAFE, one_line
from kvprov.cli.options import json_option
from kvprov.cli.terminal import page, status
from kvprov.doctor import Diagnosis, Level, diagnose

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: Final = {Level.UNSAFE: "bold red", Level.FAILED: "bold red", Level.WARNING: "yellow"}


@click.command()
@click.option("--no-engine", is_flag=True, help="Import no engine: quicker, and silent on what kvprov binds in it.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, no_engine: bool, as_json: bool) -> None:
    """Say whether engines started here would be protected.

    Looks at settings, the fleet secret, dimensions, the digest cache, installed engines and plugins, and asks an
    installed vLLM or SGLang whether kvprov can bind it. Secrets are never shown. Exits with 1 when something is
    unsafe, and with 3 when an installed engine could not be asked.
    """
    with status("Looking; importing an engine takes about ten seconds ..."):
        diagnosis = diagnose(inspect_engines=not no_engine)
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), indent=2))
    else:
        with page() as console:
            _show(console, diagnosis)
    if diagnosis.has(Level.UNSAFE):
        ctx.exit(UNSAFE)
    if diagnosis.has(Level.FAILED):
        ctx.exit(ENGINE)


def _show(console: Console, diagnosis: Diagnosis) -> None:
    from kvprov.doctor.engines import DISTRIBUTIONS

    facts = {section.name: section.facts for section in diagnosis.sections}
    versions = facts["versions"]
    console.print(f"kvprov {versions['kvprov']} on Python {versions['python']}")
    _table(
        console,
        "Settings",
        [(name, _plain(setting["value"]), _setting_state(setting)) for name, setting in facts["settings"].items()],
    )
    secret = facts["secret"]
    _table(
        console,
        "Fleet secret",
        [(secret["source"] or "none", f"key id {secret['key_id']}" if secret["key_id"] else "", _mode(secret))],
    )
    dimensions = facts["dimensions"]
    _table(
        console,
        "Dimensions",
        [(d["name"], f"{d['half']}, {d['kind']}", "" if d["built_in"] else "extension") for d in dimensions["bound"]]
        + [(name, "WITHHELD", "") for name in dimensions["withheld"]],
    )
    cache = facts["cache"]
    _table(console, "Digest cache", [(cache["state"], f"{cache['files']} files", cache["folder"])])
    ledger = facts["ledger"]
    _table(console, "Ledger", [(ledger["state"], ledger["location"] or "")])
    _table(
        console,
        "Engines and tiers",
        [(DISTRIBUTIONS[name], version, f"package {name}") for name, version in facts["engines"].items()]
        or [("none installed",)],
    )
    _table(
        console,
        "Plugins",
        [(p["name"], p["group"], _plugin_state(p)) for p in facts["plugins"]] or [("none",)],
    )
    if facts.get("vllm"):
        _show_engine(console, "vLLM", facts["vllm"], "Connectors", facts["vllm"]["connectors"])
    if facts.get("sglang"):
        _show_engine(console, "SGLang", facts["sglang"], "Paths", facts["sglang"]["paths"])
    _show_findings(console, diagnosis)


def _show_engine(console: Console, name: str, facts: dict[str, Any], what: str, ways: list[dict[str, Any]]) -> None:
    """Show what kvprov binds in an engine: its seams, and each of the ways by which the engine shares KV state."""
    seams = facts["seams"]
    sound = sum(not seam["error"] for seam in seams)
    _table(
        console,
        f"{name} {facts['version']}: {sound} of {len(seams)} seams are there",
        [(seam["name"], "missing", seam["module"]) for seam in seams if seam["error"]],
    )
    refused: dict[str, list[str]] = {}
    for way in ways:
        if not way["bound"]:
            refused.setdefault(way["reason"], []).append(way["name"])
    _table(
        console,
        f"{what} that are bound",
        [(way["name"], f"{way['treatment']}: {way['reason']}", way["strength"]) for way in ways if way["bound"]],
    )
    _table(console, f"{what} that are refused", [(why, ", ".join(names)) for why, names in refused.items()])


def _show_findings(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print()
    table = Table.grid(padding=(0, 2))
    for finding in diagnosis.findings:
        level = Text(finding.level.upper(), style=_STYLES[finding.level])
        table.add_row(level, one_line(f"{finding.message} {finding.advice}"))
    if diagnosis.findings:
        console.print(table)
    if diagnosis.has(Level.UNSAFE):
        console.print("Unsafe.", style="bold red")
    elif diagnosis.has(Level.FAILED):
        console.print("Unknown: an engine could not be asked.", style="bold red")
    else:
        console.print("Nothing unsafe was found.", style="bold green")


def _table(console: Console, title: str, rows: list[tuple[str, ...]]) -> None:
    """Print rows under a title: no lines are drawn, so that it reads the same in a log."""
    from rich.table import Table

    console.print()
    console.print(title, style="bold")
    table = Table.grid(padding=(0, 2))
    for _ in range(1 + max(map(len, rows), default=0)):
        # Folded rather than cut off: the end of a path matters most.
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(" ", *(one_line(cell) for cell in row))
    if rows:
        console.print(table)


def _plain(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _setting_state(setting: dict[str, Any]) -> str:
    return "REFUSED" if setting["refused"] else "" if setting["set"] else "default"


def _mode(secret: dict[str, Any]) -> str:
    return f"file mode {secret['file_mode']}" if secret["file_mode"] else ""


def _plugin_state(plugin: dict[str, Any]) -> str:
    if not plugin["allowed"]:
        return "FILTERED OUT"
    if plugin["loads"] is None:
        return "not kvprov's"
    return "loads" if plugin["loads"] else "CANNOT BE LOADED"
