"""The report and the table: they say what was measured, whatever it was, and load nothing."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from kvprov.demo import report, table, words
from kvprov.demo.results import Results
from tests.demo.made_up import LOADABLE, loads, results

VOID = {"meta", "link", "br", "img", "input", "hr"}
LOADING_TAGS = {"script", "link", "img", "iframe", "object", "embed", "image", "use", "video", "audio", "base"}


class Checker(HTMLParser):
    """Notes what a page loads and whether its elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loading: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in LOADING_TAGS or any(name in {"src", "srcset", "href", "xlink:href", "data"} for name, _ in attrs):
            self.loading.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def test_report_is_one_small_well_formed_file_that_loads_nothing() -> None:
    html = report.render(results())
    assert checked(html).loading == []
    assert not re.search(r"https?:|url\(|@import|//[a-z]", html)
    assert len(html.encode()) < 100_000
    assert '<meta name="viewport"' in html
    assert "prefers-color-scheme: dark" in html


def test_report_says_what_was_measured() -> None:
    text = " ".join("".join(checked(report.render(results())).text).split())
    assert "All 9 claims hold" in text
    assert "accuracy went from 98.5 % to 0.0 %" in text
    assert "served 0 foreign tokens and gave 200 of 200 answers as it does alone" in text
    assert f"still reads all {LOADABLE:,} tokens of its own state" in text
    assert "4.5.6" in text
    assert (
        "A's adapter had the same bytes in every process, B's adapter had the same bytes in every process, and the two "
        "differ." in text
    )
    assert "Equal in all 9 processes." in text
    assert "they include the engine's start" in text


def test_report_of_failed_claims_says_so() -> None:
    bad = results(cross_bound=loads(A=128), renamed_bound=loads())
    text = " ".join("".join(checked(report.render(bad)).text).split())
    assert "2 of 9 claims do not hold" in text
    assert "Does not hold. 128 foreign tokens read" in text
    assert "served 128 foreign tokens" in text
    assert "still reads all" not in text


def test_text_is_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    plain = results()
    outcomes = [replace(outcome, adapter_folder=hostile) for outcome in plain.outcomes]
    html = report.render(Results(plain.wanted, tuple(outcomes), {"vllm": hostile, hostile: "&"}, 1.0))
    assert checked(html).loading == []
    assert "&lt;script&gt;alert(1)" in html


def test_picture_shows_each_writer_in_the_store() -> None:
    scenes = report.picture(results(own_bound=loads(A=128, B=LOADABLE - 128))).scenes
    lanes = [[(lane.writer, lane.kind) for lane in scene.lanes] for scene in scenes]
    assert lanes == [
        [("B", "own")],
        [("A", "foreign")],
        [("A", "none")],
        [("A", "foreign"), ("B", "own")],
        [("A", "none"), ("B", "own")],
    ]
    assert "B was served 128 tokens that A had written and 25,472 tokens that B had written" in scenes[3].text


def test_picture_has_a_text_for_who_cannot_see_it() -> None:
    html = report.render(results())
    assert 'role="img" aria-labelledby="picture-title picture-text"' in html
    for scene in report.picture(results()).scenes:
        assert html.count(scene.text.replace("'", "&#39;")) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_a_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    table.show(results(), console, Path("out"))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in printed.splitlines()) <= width
    assert "B reads where A stored" in printed
    assert "All 9 claims hold" in printed
    for sentence in words.headline(results()):
        assert sentence.split()[-1] in printed


def test_table_names_the_claims_that_do_not_hold() -> None:
    console = Console(file=io.StringIO(), width=200)
    table.show(results(cross_bound=loads(A=128)), console, Path("out"))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    said = "With kvprov, B is served nothing of A's, though the store holds as much of it. 128 foreign tokens read"
    assert f"DOES NOT HOLD  {said}" in printed
    assert "claims hold" not in printed
