"""Documents as self-contained pages: no network, and no script but that of the graph."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import singledispatch

from backquant.files import write_text
from backquant.pages.document import (
    Box,
    Cell,
    Document,
    Drawing,
    Graph,
    Items,
    Listing,
    Note,
    Part,
    Row,
    Section,
    Table,
    Terms,
    cell_of,
)
from backquant.pages.layout import BOX_HEIGHT, BOX_WIDTH, lay_out
from backquant.pages.markup import Assets, Child, Element, page, table, tag

_LABEL = 24  # letters that a box holds
_FOOTER = "Written by backquant. This page needs no network."
_MOVING = (
    " Drag the graph to move it, turn the wheel to zoom, click an operator for everything about it; "
    "operators that share its qparams are outlined with dashes."
)


def to_html(document: Document) -> str:
    """The page as text.

    >>> "<h1>a &amp; b" in to_html(Document("a & b", "it is quantized"))
    True
    """
    graph = next((part for part in _within(document.parts) if isinstance(part, Graph)), None)
    assets = Assets("pages", ("page.css",))
    if graph is not None:
        assets = Assets("pages", ("page.css",), "page.js", _data(graph))
    name = f"{document.title} {document.about}".rstrip()
    return page(
        f"{name} · backquant",
        assets,
        tag("header", *_head(document)),
        tag("main", *fragment(document.parts)),
        tag("footer", _FOOTER + (_MOVING if graph is not None else "")),
    )


def fragment(parts: Iterable[Part]) -> list[Element]:
    """Parts of a document, to stand in a page of others."""
    return [element for part in parts for element in _elements(part)]


def _within(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        yield part
        yield from _within(part.parts) if isinstance(part, Section) else ()


def _head(document: Document) -> Iterator[Element]:
    yield tag("h1", f"{document.title} ", tag("span", document.about))
    yield tag("p", document.headline, class_=f"headline {document.tone}".rstrip())
    figures = [card for card in document.cards if card.value]
    shown = (
        tag(
            "div",
            *(_soft(card.name), tag("b", card.value), _soft(card.remark), *_share(card.share)),
            class_="card",
        )
        for card in figures
    )
    yield from [tag("div", *shown, class_="cards")] if figures else []
    for card in document.cards:
        if not card.value:
            yield tag("p", tag("b", f"{card.name} "), card.remark, class_="line")


def _soft(text: str) -> Element:
    return tag("span", text, class_="soft")


def _link(text: str, node: str) -> Element:
    """A link to an operator of the graph, which the script follows."""
    return tag("a", text, class_="node", data_node=node)


@singledispatch
def _elements(part: object) -> Iterator[Element]:
    raise TypeError(f"{type(part).__name__} is no part of a document")


@_elements.register
def _(part: Section) -> Iterator[Element]:
    shown = fragment(part.parts)
    if not shown:
        return
    if part.folded:
        yield tag("details", tag("summary", tag("h2", part.title)), *shown, class_="section")
        return
    yield from [tag("h2", part.title)] if part.title else []
    small = [element for element in shown if _kind(element) in _SMALL]
    yield from (element for element in shown if _kind(element) not in _SMALL)
    if small:
        yield tag("div", *small, class_="grid")


_SMALL = ("panel terms", "panel terms wide", "panel figure")  # stand side by side


def _kind(element: Element) -> object:
    return dict(element.attributes).get("class")


@_elements.register
def _(part: Note) -> Iterator[Element]:
    yield tag("p", part.text, class_="soft")


@_elements.register
def _(part: Items) -> Iterator[Element]:
    if part.items:
        yield tag("h2", part.label.capitalize())
        yield tag("div", *(tag("code", item) for item in part.items), class_="items")


@_elements.register
def _(part: Listing) -> Iterator[Element]:
    if part.lines and not part.title:
        yield tag("ul", *(tag("li", line) for line in part.lines))
    elif part.lines:
        title = tag("summary", f"{part.title} ", _soft(f"({len(part.lines)})"))
        yield tag("details", title, tag("ul", *(tag("li", line) for line in part.lines)))


@_elements.register
def _(part: Terms) -> Iterator[Element]:
    terms: list[Element] = []
    for term in part.terms:
        remark: list[Child] = [" ", _soft(term.remark)] if term.remark else []
        terms += [tag("dt", term.name), tag("dd", term.text, *remark, class_=term.name)]
    lists: list[Element] = []
    for head, names in part.lists:
        lists += [tag("p", head, class_="soft")] if head else []
        items = (tag("li", _link(name, node), " ", _soft(what)) for what, name, node in names)
        lists.append(tag("ul", *items))
    title = _link(part.title, part.node) if part.node else part.title
    wide = " wide" if lists else ""
    yield tag("div", tag("h3", title), tag("dl", *terms), *lists, class_=f"panel terms{wide}")


@_elements.register
def _(part: Table) -> Iterator[Element]:
    if not part.rows:
        return
    kinds = [part.columns[at].kind or None for at in part.used]
    heads = (
        tag("th", part.columns[at].name, class_=kind)
        for at, kind in zip(part.used, kinds, strict=True)
    )
    rows = (_row(row, part.used, kinds) for row in part.rows)
    yield tag("div", table(heads, rows), class_="panel scroll")


def _row(row: Row, used: Iterable[int], kinds: Iterable[str | None]) -> Element:
    cells = (
        tag(
            "td",
            *_cell(cell_of(row.cells[at])),
            class_=kind,
            title=cell_of(row.cells[at]).tip or None,
        )
        for at, kind in zip(used, kinds, strict=True)
    )
    return tag("tr", *cells, data_node=row.node or None, data_state=row.state or None)


def _cell(cell: Cell) -> Iterator[Child]:
    if cell.heat is not None:
        yield tag("i", class_="heat", style={"opacity": cell.heat})
    text: list[Child] = []
    for line in cell.text.split("\n"):
        text += [tag("br"), line] if text else [line]
    if cell.node:
        yield _link(cell.text, cell.node)
    elif cell.kind:
        yield tag("span", *text, class_=f"tag {cell.kind}")
    else:
        yield from text
    yield from _share(cell.share)


def _share(part: float | None) -> list[Element]:
    """A bar."""
    if part is None:
        return []
    return [tag("i", class_="share", style={"width": round(100 * part, 1)})]


@_elements.register
def _(part: Drawing) -> Iterator[Element]:
    if not part.title:
        yield tag("div", part.element, class_="panel plot")
        yield from [tag("p", part.caption, class_="soft")] if part.caption else []
        return
    title, caption = tag("h3", part.title), _soft(part.caption)
    yield tag("div", title, part.element, caption, class_="panel figure")


@_elements.register
def _(part: Graph) -> Iterator[Element]:
    words = (tag("span", text, class_=f"tag {kind}") for kind, text in part.legend.items())
    legend = tag("div", *words, class_="legend")
    stage = tag("div", drawn(part), class_="stage")
    detail = tag("div", _soft("This model has no operators."), class_="panel", id="detail")
    yield tag("div", tag("div", legend, stage, class_="panel"), detail, class_="split")


def drawn(graph: Graph) -> Element:
    """The graph as SVG, from top to bottom."""
    drawing = lay_out([box.node for box in graph.boxes], graph.inputs)
    edges = (
        tag(
            "path", class_="edge", data_from=edge.source, data_to=edge.target, d=_curve(edge.points)
        )
        for edge in drawing.edges
    )
    boxes = (_box(box, drawing.centres[box.node]) for box in graph.boxes)
    return tag(
        "svg",
        tag("g", *edges, *boxes, id="view"),
        id="canvas",
        width=drawing.width,
        height=drawing.height,
        role="img",
        aria_label=f"graph of {len(graph.boxes)} operators",
    )


def _curve(points: Iterable[tuple[float, float]]) -> str:
    """A smooth vertical curve through the points."""
    (x0, y0), *rest = points
    parts = [f"M{x0:g},{y0:g}"]
    for x1, y1 in rest:
        middle = (y0 + y1) / 2
        parts.append(f"C{x0:g},{middle:g} {x1:g},{middle:g} {x1:g},{y1:g}")
        x0, y0 = x1, y1
    return "".join(parts)


def _box(box: Box, centre: tuple[float, float]) -> Element:
    size = {"width": BOX_WIDTH, "height": BOX_HEIGHT}
    x, y = (round(at - side / 2, 1) for at, side in zip(centre, size.values(), strict=True))
    heat = [] if box.heat is None else [tag("rect", class_="heat", **size, fill_opacity=box.heat)]
    return tag(
        "g",
        tag("rect", **size),
        *heat,
        tag("text", _shorten(box.title), x=BOX_WIDTH / 2, y=17),
        tag("text", _shorten(box.subtitle), class_="sub", x=BOX_WIDTH / 2, y=31),
        class_=f"box {box.kind}".rstrip(),
        data_node=box.node,
        transform=f"translate({x},{y})",
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _LABEL else "…" + text[-_LABEL + 1 :]


def _data(graph: Graph) -> dict[str, object]:
    """What the script reads."""
    return {
        "details": {box.node: [pair for pair in box.details if pair[1]] for box in graph.boxes},
        "kin": {box.node: list(box.kin) for box in graph.boxes if box.kin},
        "first": graph.first,
        "size": {"width": BOX_WIDTH, "height": BOX_HEIGHT},
    }


# What results have in common that people read.


class Shown(ABC):
    """A result that says its ``document``: print it, or save it as a page or as Markdown."""

    @abstractmethod
    def document(self) -> Document:
        """What a person reads of it."""

    def render(self, *, width: int = 140, color: bool = False) -> str:
        """As text; tables have at most ``width`` columns."""
        from backquant.pages.text import render

        return render(self.document(), width=width, color=color)

    def __str__(self) -> str:
        return self.render()

    def to_html(self) -> str:
        """One self-contained page that works offline."""

        return to_html(self.document())

    def to_markdown(self) -> str:
        """The same as Markdown, without figures."""
        from backquant.pages.text import to_markdown

        return to_markdown(self.document())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path`` (under a temporary name first); ``UsageError`` where it cannot be."""
        write_text(path, self.to_html(), "save_html(path)")

    def save_markdown(self, path: str | os.PathLike[str]) -> None:
        """Write the Markdown to ``path`` likewise."""
        write_text(path, self.to_markdown(), "save_markdown(path)")
