"""A document with every part, in its three forms."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from backquant.pages import (
    Box,
    Card,
    Cell,
    Column,
    Document,
    Drawing,
    Graph,
    Items,
    Listing,
    Note,
    Row,
    Section,
    Table,
    Term,
    Terms,
)
from backquant.pages.html import to_html
from backquant.pages.markup import tag
from backquant.pages.text import render, to_markdown

ROWS = [
    Row((Cell("fc", node="fc", heat=0.5), "nn.Linear\nF.linear", Cell("3", share=0.3), ""), "fc"),
    Row(("a|b", "add", Cell("1", kind="bad", tip="off by 2"), ""), "add", "float"),
]
COLUMNS = [Column("operator"), Column("what", "code"), Column("cost", "number"), Column("unused")]
GRAPH = Graph(
    [Box("fc", "Linear", "fc", "quantized", details=[("kernel", "linear"), ("fix", "")])],
    {"fc": ["add"]},
    "fc",
    {"quantized": "1 quantized"},
)
DOCUMENT = Document(
    "Net",
    "Net is quantized",
    [Card("size", "3.1×", "(8 kB)", 0.9), Card("next", "", "export it " * 12)],
    [
        Section("Numbers", [Note("What they mean."), Table(COLUMNS, ROWS, few=1, more="are left")]),
        Section("The graph", [GRAPH, Drawing(tag("svg"), "plot", "a caption")], in_text=False),
        Items("kernels", ["2 × linear", "1 × add"]),
        Section(
            "Notes", [Listing("Unused", ["a rule"], "unused"), Listing("Many", list("ab"), most=1)]
        ),
        Section(
            "Reasons",
            [
                Terms(
                    "fc stays float",
                    [Term("rule", "dtype", "x86")],
                    [("slow", [("add", "s", "s")])],
                )
            ],
        ),
        Section("Nothing", [Table(COLUMNS, []), Listing("", [])]),
    ],
    about="on x86",
)


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_text(snapshot: Callable[..., None]) -> None:
    snapshot("text", render(DOCUMENT, width=80))
    assert all(len(line) <= 80 for line in render(DOCUMENT, width=80).splitlines())


def test_markdown(snapshot: Callable[..., None]) -> None:
    snapshot("markdown", to_markdown(DOCUMENT))


def test_html() -> None:
    page = to_html(DOCUMENT)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    for part in ("nn.Linear<br>F.linear", 'title="off by 2"', "width:90%", "<h3>plot</h3>", "(2)"):
        assert part in page
    assert "unused</th>" not in page and "Nothing" not in page
    assert page.count('<div class="grid">') == 2


def test_what_is_no_part_is_an_error() -> None:
    for write in (render, to_markdown):
        with pytest.raises(TypeError, match="int is no part of a document"):
            write(3)
