"""The page of a run as HTML: entries with the same dtype configs stand in one table, by what they claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backquant.conformance.case import FAILURES, Verdict
from backquant.conformance.page import (
    HOW_TO_READ,
    Block,
    Reason,
    Row,
    blocks,
    cell_text,
    headline,
    reasons,
    short,
)
from backquant.conformance.results import Conformance, Tally
from backquant.markup import Assets, Child, Element, page, table, tag


def _cell(tally: Tally | None) -> tuple[str, str, str]:
    """Its class, what it says, and its reason."""
    if tally is None:
        return "none", "", ""
    if tally.verdict is Verdict.TOO_NARROW:
        return "narrow", cell_text(tally).replace(" (too narrow)", ""), tally.why
    if tally.verdict in FAILURES:
        return "bad", cell_text(tally), tally.why
    kind = "none" if tally.verdict is Verdict.UNTRIED else "good"
    return kind, cell_text(tally), tally.why


def to_html(found: Conformance) -> str:
    """The page as HTML; a cell tells its reason when it is pointed at.

    >>> "<small class=\\"none\\">nothing was computed</small>" in to_html(Conformance("x86", "x86", {}))
    True
    """
    integers = [
        ("of the integers equal", f"{found.bit_equal:.3%}"),
        ("steps at worst", f"{found.worst:g}"),
    ]
    cards: list[tuple[str, Any]] = [
        ("cases", f"{found.cases:,}"),
        *(integers if found.computed else []),
        *((v.value, f"{n:,}") for v, n in sorted(found.counts.items(), key=lambda pair: -pair[1])),
    ]
    colour = "bad" if not found.conforms else "good" if found.computed else "none"
    versions = " · ".join(f"{name} {version}" for name, version in found.versions.items())
    early = "" if found.complete else " · the time was up before all cases were run"
    shown = (tag("div", tag("b", number), label, class_="card") for label, number in cards)
    return page(
        f"{found.backend} on {found.engine}",
        Assets("conformance", ("page.css",)),
        tag(
            "h1",
            f"{found.backend} on {found.engine} ",
            tag("small", headline(found), class_=colour),
        ),
        tag("p", f"{versions} · {found.date} · seed {found.seed}{early}", class_="about"),
        tag("div", *shown, class_="cards"),
        tag("p", HOW_TO_READ, class_="read"),
        *_said(found),
        *(part for block in blocks(found) for part in _block(block)),
    )


def _said(found: Conformance) -> Iterator[Element]:
    """What holds for several entries, with their patterns."""
    for title, group in reasons(found):
        yield tag("h2", title)
        yield tag("ul", *(tag("li", _reason(reason)) for reason in group))


def _reason(reason: Reason) -> Element:
    number = len(reason.patterns)
    about = f"({reason.dtypes}; {number} {'entry' if number == 1 else 'entries'})"
    summary = tag(
        "summary", f"{reason.verdict.value}: {reason.why} ", tag("span", about, class_="about")
    )
    patterns: list[Child] = []
    for pattern in reason.patterns:
        patterns += [", "] if patterns else []
        patterns.append(tag("code", pattern))
    return tag("details", summary, *patterns)


def _block(block: Block) -> Iterator[Element]:
    heads: list[Child] = [
        tag("th", "entry", class_="p"),
        *block.columns,
        tag("th", "kernel", class_="k"),
    ]
    yield tag("h2", block.title)
    yield table(heads, map(_row, block.rows))


def _row(row: Row) -> Element:
    verdicts = (
        tag("td", text, class_=kind, title=why or None) for kind, text, why in map(_cell, row.cells)
    )
    first, last = tag("td", short(row.pattern), class_="p"), tag("td", row.kernel, class_="k")
    return tag("tr", first, *verdicts, last)
