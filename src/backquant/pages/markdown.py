"""Documents as Markdown, of GitHub's form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import singledispatch

from backquant.pages.document import (
    Document,
    Drawing,
    Graph,
    Items,
    Listing,
    Note,
    Section,
    Table,
    Terms,
    cell_of,
)
from backquant.pages.markup import markdown


def to_markdown(shown: object) -> str:
    """A document, or a part of one.

    >>> from backquant.pages import Card
    >>> print(to_markdown(Document("a_b", "it is quantized", [Card("size", "8 kB")])))
    # a\\_b
    <BLANKLINE>
    it is quantized
    <BLANKLINE>
    - size: 8 kB
    <BLANKLINE>
    """
    return "\n".join(_lines(shown)) + "\n"


def _after_blanks(parts: Iterable[object]) -> Iterator[str]:
    for part in parts:
        if shown := list(_lines(part)):
            yield from ("", *shown)


@singledispatch
def _lines(part: object) -> Iterator[str]:
    raise TypeError(f"{type(part).__name__} is no part of a document")


@_lines.register
def _(part: Document) -> Iterator[str]:
    yield f"# {markdown(f'{part.title} {part.about}'.rstrip())}"
    yield from ("", markdown(part.headline))
    yield from [""] if part.cards else []
    yield from (f"- {markdown(card.name)}: {markdown(card.words)}" for card in part.cards)
    yield from _after_blanks(part.parts)


@_lines.register
def _(part: Section) -> Iterator[str]:
    if shown := list(_after_blanks(part.parts)):
        yield from [f"## {markdown(part.title)}"] if part.title else []
        yield from shown if part.title else shown[1:]


@_lines.register
def _(part: Note) -> Iterator[str]:
    yield markdown(part.text)


@_lines.register
def _(part: Items) -> Iterator[str]:
    if part.items:
        yield f"{markdown(part.label)}: {', '.join(map(markdown, part.items))}"


@_lines.register
def _(part: Listing) -> Iterator[str]:
    if part.lines:
        yield from [f"{markdown(part.title)}:", ""] if part.title else []
        yield from (f"- {markdown(line)}" for line in part.lines)


@_lines.register
def _(part: Terms) -> Iterator[str]:
    yield from (f"**{markdown(part.title)}**", "")
    for term in part.terms:
        yield f"- {term.name}: {markdown(' '.join(filter(None, (term.text, term.remark))))}"
    for head, names in part.lists:
        shown = ", ".join(f"{name} ({operator})" for operator, name, _ in names)
        yield f"- {markdown(f'{head}: {shown}' if head else shown)}"


@_lines.register
def _(part: Table) -> Iterator[str]:
    if part.rows:
        yield _row(markdown(part.columns[at].name) for at in part.used)
        yield _row("---" for _ in part.used)
    for row in part.rows:
        yield _row(_cell(cell_of(row.cells[at]).text, part.columns[at].kind) for at in part.used)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str, kind: str) -> str:
    if kind == "code" and text and "`" not in text:
        return "`{}`".format(" ".join(text.split()).replace("|", "\\|"))
    return "<br>".join(map(markdown, text.splitlines()))


@_lines.register(Graph)
@_lines.register(Drawing)
def _(part: object) -> Iterator[str]:  # noqa: ARG001 - figures are for pages
    yield from ()
