"""Documents as text for a terminal: prose in 79 columns, tables as wide as the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import singledispatch
from textwrap import wrap

from rich.box import HORIZONTALS
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from backquant.pages.console import SafeConsole
from backquant.pages.document import (
    Card,
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

_WIDTH = 79
_NAME = 10  # columns of the name of a figure or a term
_STYLE = {"quantized": "green", "integers": "cyan", "float": "yellow", "not_tensor": "dim"}
_KEPT = "\0"  # a space at which no line ends


def render(*shown: object, width: int = 140, color: bool = False) -> str:
    """Documents, their parts, texts, and what rich can print, as a string without trailing blanks.

    >>> from backquant.pages import Card
    >>> print(render(Document("Net", "Net is quantized", [Card("size", "3.1×", "(8 kB)")])))
    Net is quantized
      size      3.1× (8 kB)
    """
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=width, force_terminal=color, no_color=not color)
    for part in _flat(renderable(*shown)):
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def renderable(*shown: object) -> Group:
    """The same for a rich console."""
    return Group(*(part for one in shown for part in _parts(one)))


def _flat(shown: RenderableType) -> Iterator[RenderableType]:
    if not isinstance(shown, Group):
        yield shown
        return
    for part in shown.renderables:
        yield from _flat(part)


@singledispatch
def _parts(part: object) -> Iterator[RenderableType]:
    if not hasattr(part, "__rich_console__"):
        raise TypeError(f"{type(part).__name__} is no part of a document")
    yield part


@_parts.register
def _(part: str) -> Iterator[RenderableType]:
    yield Text(part)


@_parts.register
def _(part: Document) -> Iterator[RenderableType]:
    yield Text(part.headline, style="bold")
    width = max([_NAME, *(len(card.name) + 2 for card in part.cards)])
    yield from (Text(line) for card in part.cards for line in _card(card, width))
    for one in part.parts:
        if any(shown := list(_parts(one))):
            yield Text("")
            yield from shown


def _card(card: Card, width: int) -> list[str]:
    first = f"  {card.name:<{width}}"
    return wrap(card.words, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first))


@_parts.register
def _(part: Section) -> Iterator[RenderableType]:
    shown = [list(_parts(one)) for one in part.parts] if part.in_text else []
    if not any(shown):
        return
    if part.title:
        yield Text(part.title, style="bold")
    before: object = None
    for one, lines in zip(part.parts, shown, strict=True):
        if lines:
            apart = before is not None and isinstance(one, _APART) | isinstance(before, _APART)
            yield from [Text("")] if apart else []
            yield from lines
            before = one


_APART = (Table, Terms)  # with a blank line before and after


@_parts.register
def _(part: Note) -> Iterator[RenderableType]:
    yield from map(Text, wrap(part.text, _WIDTH))


@_parts.register
def _(part: Items) -> Iterator[RenderableType]:
    kept = ", ".join(item.replace(" ", _KEPT) for item in part.items)
    indent = " " * (len(part.label) + 2)
    lines = wrap(f"{part.label}: {kept}", _WIDTH, subsequent_indent=indent) if kept else []
    yield from (Text(line.replace(_KEPT, " ")) for line in lines)


@_parts.register
def _(part: Listing) -> Iterator[RenderableType]:
    if part.most is None or len(part.lines) <= part.most:
        label = f"{part.label}: " if part.label else ""
        yield from (Text(f"{label}{line}") for line in part.lines)


@_parts.register
def _(part: Terms) -> Iterator[RenderableType]:
    yield Text(part.title)
    for term in part.terms:
        text = term.text.replace("\n", "\n" + " " * (_NAME + 2))
        yield Text(f"  {term.name:<{_NAME}}{text}{f'   {term.remark}' if term.remark else ''}")
    for head, names in part.lists:
        yield from [Text(f"{' ' * (_NAME + 2)}{head}:")] if head else []
        indent = " " * (_NAME + (4 if head else 2))
        yield from (Text(f"{indent}{operator}  {name}") for operator, name, _ in names)


@_parts.register
def _(part: Table) -> Iterator[RenderableType]:
    rows = part.rows[: part.few]
    if not rows:
        return
    made = RichTable(box=HORIZONTALS, show_edge=False, pad_edge=False, header_style="bold")
    for at in part.used:
        column = part.columns[at]
        justify = "right" if column.kind == "number" else "left"
        made.add_column(column.name, overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in rows:
        cells = (Text(cell_of(row.cells[at]).text) for at in part.used)
        made.add_row(*cells, style=_STYLE.get(row.state, ""))
    yield made
    if len(rows) < len(part.rows):
        yield Text(f"{len(part.rows) - len(rows)} {part.more}")


@_parts.register(Graph)
@_parts.register(Drawing)
def _(part: object) -> Iterator[RenderableType]:  # noqa: ARG001 - figures are for pages
    yield from ()


# Documents as Markdown, of GitHub's form.


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
