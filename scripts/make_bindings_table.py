"""Writes the table of measurements in docs/bindings.md from build/bindings/results.json, which the engine tests leave.

    python scripts/make_bindings_table.py [--check]

With --check, nothing is written: it fails if the document says anything else than the measurements.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bindings" / "results.json"
DOCUMENT = ROOT / "docs" / "bindings.md"
BEGIN, END = "<!-- measurements: begin -->", "<!-- measurements: end -->"
BINDINGS = ("unbound", "bound", "withheld")


def figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["foreign_tokens"] is None:
        return "dies of it"
    wrong = "" if row["matches_reference"] else ", wrong answers"
    return f"{row['foreign_tokens']}{wrong}"


def table(rows: list[dict[str, Any]]) -> str:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the document differs")
    check = parser.parse_args().check
    if not RESULTS.exists():
        raise SystemExit(f"There are no measurements in {RESULTS.relative_to(ROOT)}: run `make engine` first.")
    text = DOCUMENT.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT.relative_to(ROOT)} has no place for them: {BEGIN} and {END}.")
    wanted = f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_text())['rows'])}\n{END}{after}"
    if wanted == text:
        return
    if check:
        raise SystemExit(
            f"{DOCUMENT.relative_to(ROOT)} differs from what was measured. Run `python scripts/make_bindings_table.py` "
            "and read the difference: a path may share, or fail to share, what it did not before."
        )
    DOCUMENT.write_text(wanted)


if __name__ == "__main__":
    main()
