"""Writes the table of measurements of docs/sglang.md.

    python scripts/make_sglang_table.py [--check]

The measurements are those of build/sglang/results.json, which `make engine-sglang` leaves. With --check, nothing is
written: it fails if the document says anything else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "sglang" / "results.json"
DOCUMENT = ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- sglang-measurements: begin -->", "<!-- sglang-measurements: end -->"
BINDINGS = ("unbound", "bound", "withheld")
COLUMNS = ("stock", "bound", "bound, own", "withheld")

Row = dict[str, Any]


def foreign(row: Row | None) -> str:
    """Give what a request read that it must not, and what else is to be said of it."""
    if row is None:
        return ""
    if row["foreign_tokens"] is None:
        return str(row["note"])
    parts = [str(row["foreign_tokens"])]
    if not row["matches_reference"]:
        parts.append("wrong answers")
    if row["note"]:
        parts.append(row["note"])
    return ", ".join(parts)


def own(row: Row | None) -> str:
    """Give how much a request read of what it may."""
    return "" if row is None or row["own_tokens"] is None else f"{row['own_tokens']} of {row['loadable_tokens']}"


def is_sharing(row: Row) -> bool:
    """Whether a row is of state that may be shared."""
    return row["binding"] == "unbound" and row["own_tokens"] is not None and not row["note"]


def table(head: list[str], columns: tuple[str, ...], releases: list[str], lines: list[list[str]]) -> str:
    titles = [*head, *(f"{release}: {column}" for release in releases for column in columns)]
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def measurements(rows: list[Row]) -> str:
    releases = sorted({row["release"] for row in rows})
    found = {(row["release"], row["page_size"], row["case"], row["binding"]): row for row in rows}
    shared = {row["case"] for row in rows if is_sharing(row)}
    cases = sorted({(row["dimension"], row["case"], row["page_size"]) for row in rows})

    def head(dimension: str, case: str, page: int) -> list[str]:
        return [" ".join(f"`{name}`" for name in dimension.split("+")), case, str(page)]

    apart, together = [], []
    for dimension, case, page in cases:
        cells = head(dimension, case, page)
        for release in releases:
            stock, bound, withheld = (found.get((release, page, case, binding)) for binding in BINDINGS)
            cells += (
                [own(stock), own(bound)]
                if case in shared
                else [foreign(stock), foreign(bound), own(bound), foreign(withheld)]
            )
        (together if case in shared else apart).append(cells)
    titles = ["dimension", "what differs", "page"]
    return "\n\n".join(
        [
            "Tokens that a reader takes from entries which it must not read, of a whole prompt:",
            table(titles, COLUMNS, releases, apart),
            "Tokens that a reader takes from entries which it may read:",
            table(titles, ("stock", "bound"), releases, together),
        ]
    )


def replaced(text: str, wanted: str) -> str:
    """Return the document with `wanted` in the place that is marked for it."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"{DOCUMENT.relative_to(ROOT)} has no place for the measurements: {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{wanted}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the document differs")
    check = parser.parse_args().check
    if not RESULTS.exists():
        raise SystemExit(f"There are no measurements in {RESULTS.relative_to(ROOT)}: run `make engine-sglang` first.")
    text = DOCUMENT.read_text()
    wanted = replaced(text, measurements(json.loads(RESULTS.read_text())["rows"]))
    if wanted == text:
        return
    if check:
        raise SystemExit(
            f"{DOCUMENT.relative_to(ROOT)} differs from what was measured. Run `make sglang-table` and read the "
            "difference: a case may share, or fail to share, what it did not before."
        )
    DOCUMENT.write_text(wanted)


if __name__ == "__main__":
    main()
