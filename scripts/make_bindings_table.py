"""Writes the tables of docs/bindings.md: of vLLM's connectors, of SGLang's paths, and of measurements.

    python scripts/make_bindings_table.py [--check]

Connectors and paths are those of the code, the measurements those of build/bindings/results.json, which engine tests
leave. With --check, nothing is written: it fails if the document says anything else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bindings" / "results.json"
DOCUMENT = ROOT / "docs" / "bindings.md"
CONNECTORS, PATHS, MEASUREMENTS = "connectors", "sglang-paths", "measurements"
BINDINGS = ("unbound", "bound", "withheld")


def figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["foreign_tokens"] is None:
        return "fails on it"
    wrong = "" if row["matches_reference"] else ", wrong answers"
    return f"{row['foreign_tokens']}{wrong}"


def measurements(rows: list[dict[str, Any]]) -> str:
    found = {(row["path"], row["dimension"], row["binding"]): row for row in rows}
    lines = [
        "| path | dimension that differs | stock | bound | bound, own entries | this one withheld |",
        "|---|---|---|---|---|---|",
    ]
    for path, dimension in sorted({(row["path"], row["dimension"]) for row in rows}):
        stock, bound, withheld = (found.get((path, dimension, binding)) for binding in BINDINGS)
        own = "" if bound is None else f"{bound['own_tokens']} of {bound['loadable_tokens']}"
        cells = [path, f"`{dimension}`", figure(stock), figure(bound), own, figure(withheld)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def connectors() -> str:
    from kvprov.engines.vllm.connectors import BOUND, TABLE

    lines = ["| connector | bound by | its keys, or why it is refused | strength |", "|---|---|---|---|"]
    for name, entry in TABLE.items():
        lines.append(f"| {name} | {how(entry, entry.treatment in BOUND)} | {entry.reason} | {entry.strength} |")
    return "\n".join(lines)


def how(entry: Any, allowed: bool) -> str:
    return str(entry.treatment) if allowed else f"refused ({entry.treatment})".replace(" (refused)", "")


def sglang_paths() -> str:
    from kvprov.engines.sglang.paths import rows

    lines = ["| path | bound by | its keys, or why it is refused | strength |", "|---|---|---|---|"]
    for name, entry in rows():
        lines.append(f"| {name} | {how(entry, entry.allowed)} | {entry.reason} | {entry.strength} |")
    return "\n".join(lines)


def replaced(text: str, part: str, wanted: str) -> str:
    """Return the document with `wanted` in the place that is marked for `part`."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{DOCUMENT.relative_to(ROOT)} has no place for the {part}: {begin} and {end}.")
    return f"{before}{begin}\n{wanted}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the document differs")
    check = parser.parse_args().check
    if check and not RESULTS.exists():
        raise SystemExit(f"There are no measurements in {RESULTS.relative_to(ROOT)}: run `make engine` first.")
    text = DOCUMENT.read_text()
    wanted = replaced(replaced(text, CONNECTORS, connectors()), PATHS, sglang_paths())
    if RESULTS.exists():
        wanted = replaced(wanted, MEASUREMENTS, measurements(json.loads(RESULTS.read_text())["rows"]))
    if wanted == text:
        return
    if check:
        raise SystemExit(
            f"{DOCUMENT.relative_to(ROOT)} differs from the code or from what was measured. Run `python "
            "scripts/make_bindings_table.py` and read the difference: a path may share, or fail to share, what it did "
            "not before."
        )
    DOCUMENT.write_text(wanted)


if __name__ == "__main__":
    main()
