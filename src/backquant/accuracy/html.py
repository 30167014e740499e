"""Comparisons and sensitivities as a self-contained page: graph coloured by loss, ranking, histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backquant.accuracy.comparison import Comparison, OperatorError
from backquant.accuracy.figures import decibel_text
from backquant.accuracy.sensitivity import Sensitivity
from backquant.accuracy.text import GROUP_HEADS, HEADS, MEANING, batch_count, numbers, percent_text
from backquant.markup import Assets, Child, Element, page, table, tag
from backquant.report.layout import BOX_HEIGHT, BOX_WIDTH, lay_out
from backquant.report.page import card_row, soft

_LABEL = 24
_BARS = (
    "Bars: the float model's values, counted on a logarithmic scale. Band: what the integers hold."
)
FOOTER = "Written by backquant. This page needs no network and runs no script."
_BEST, _WORST = 50.0, 10.0  # dB: from no colour to the full one
_WIDTH, _HEIGHT = 300, 90  # of a histogram


def comparison_page(found: Comparison) -> str:
    """The page of a comparison, as text.

    >>> "<svg" in comparison_page(Comparison("x86"))
    True
    """
    boxes = {
        row.node: _box(row.name, row.kernel or row.operator, row.added, _tip(row))
        for row in found.rows
    }
    cards = [
        (
            "SQNR of the outputs (higher is better)",
            decibel_text(found.sqnr),
            batch_count(found.batches),
        )
    ]
    for row in found.worst(1):
        name = f"{row.name}, {row.kernel or row.operator}"
        cards.append(("worst operator, SQNR alone", decibel_text(row.added), name))
    if found.metric is not None:
        cards.append(("metric", f"{found.metric[1]:.5g}", f"{found.metric[0]:.5g} in float"))
    clipped = [row for row in found.rows if row.clipped]
    cards.append(("values clipped", f"{len(clipped)}", f"of {len(found.rows)} tensors"))
    rows = [
        (row.node, (row.name, row.kernel or row.operator), numbers(row), heat(row.added))
        for row in found.worst(len(found.rows))
    ]
    parts = _Parts(
        what="quantized beside float",
        legend=f"{MEANING} Colour: SQNR alone.",
        cards=cards,
        heads=HEADS,
        rows=rows,
        worst=[row for row in found.worst(10) if row.histogram is not None],
    )
    return _page(found.model or found.backend, found.backend, parts, _drawing(boxes, found.inputs))


def sensitivity_page(found: Sensitivity) -> str:
    """The page of a sensitivity, as text.

    >>> "<svg" in sensitivity_page(Sensitivity("x86"))
    True
    """
    of = {name: group for group in found.groups for name in group.nodes}
    boxes = {}
    for node in found.nodes:
        group = of.get(node)
        words = "stays float" if group is None else f"alone {decibel_text(group.alone)}"
        boxes[node] = _box(node, words, math.inf if group is None else group.alone, words)
    rows = [
        (
            next((name for name in group.nodes if name in boxes), ""),
            (group.name, group.operator),
            (decibel_text(group.alone), decibel_text(group.without), f"{group.gain:+.1f} dB"),
            heat(group.alone),
        )
        for group in found.ranking()
    ]
    parts = _Parts(
        what="what each operator costs",
        legend="SQNR of the outputs in dB, higher is better. Colour: with nothing else quantized.",
        cards=[
            (
                "SQNR, everything quantized (higher is better)",
                decibel_text(found.sqnr),
                batch_count(found.batches),
            ),
            ("groups", str(len(found.groups)), "operators that are quantized together"),
        ],
        heads=GROUP_HEADS,
        rows=rows,
        worst=[],
    )
    return _page(found.model or found.backend, found.backend, parts, _drawing(boxes, found.inputs))


def heat(sqnr: float) -> float:
    """From 0 (no error to speak of) to 1.

    >>> heat(60.0), heat(30.0), heat(-3.0)
    (0.0, 0.5, 1.0)
    """
    if math.isinf(sqnr):
        return 0.0 if sqnr > 0 else 1.0
    return round(min(1.0, max(0.0, (_BEST - sqnr) / (_BEST - _WORST))), 3)


@dataclass(frozen=True)
class _Parts:
    """What a page says, but for its name and its drawing."""

    what: str
    legend: str
    cards: list[tuple[str, str, str]]
    heads: Sequence[str]
    rows: Sequence[tuple[str, tuple[str, str], Iterable[str], float]]
    worst: list[OperatorError]


def _page(title: str, backend: str, parts: _Parts, stage: Element) -> str:
    scale = tag("span", class_="scale")
    legend = tag("p", f"{parts.legend} ", scale, " 50 dB and more to 10 dB and less", class_="soft")
    tensors = [_histogram(row) for row in parts.worst]
    shown = [
        tag("h2", "The ten worst tensors"),
        tag("p", _BARS, class_="soft"),
        tag("div", *tensors, class_="tensors"),
    ]
    body = [
        tag("h2", "The worst first"),
        legend,
        ranking(parts.heads, map(_row, parts.rows)),
        *(shown if tensors else []),
        tag("h2", "The graph"),
        tag("div", stage, class_="panel stage"),
    ]
    return page(
        f"{title} on {backend}: {parts.what} · backquant",
        Assets("accuracy", ("style.css", "compare.css")),
        heading(title, f"on {backend}: {parts.what}", parts.cards),
        tag("main", *body),
        tag("footer", FOOTER),
    )


def heading(
    title: str, where: str, cards: Iterable[tuple[str, str, str]], *notes: Element
) -> Element:
    """The name of a page, its numbers, and what is in the way."""
    return tag("header", tag("h1", f"{title} ", tag("span", where)), card_row(cards), *notes)


def ranking(heads: Sequence[str], rows: Iterable[Element], words: int = 2) -> Element:
    """A table whose first columns are words, and whose others are numbers."""
    cells = [tag("th", head, class_=column_class(at, words)) for at, head in enumerate(heads)]
    return tag("div", table(cells, rows), class_="panel scroll")


def column_class(at: int, words: int) -> str | None:
    """Of the cells of a column, after ``words`` columns of text."""
    return "number" if at >= words else None


def _row(row: tuple[str, tuple[str, str], Iterable[str], float]) -> Element:
    node, (name, what), figures, hot = row
    first: list[Child] = [tag("i", style={"opacity": hot}), tag("a", name, to=node)]
    cells = (tag("td", figure, class_="number") for figure in figures)
    return tag("tr", tag("td", *first), tag("td", what), *cells)


def _box(title: str, subtitle: str, sqnr: float, tip: str) -> dict[str, Any]:
    return {
        "title": _shorten(title),
        "subtitle": _shorten(subtitle),
        "heat": heat(sqnr),
        "tip": tip,
    }


def _drawing(boxes: Mapping[str, dict[str, Any]], inputs: Mapping[str, Iterable[str]]) -> Element:
    drawing = lay_out(list(boxes), {name: list(read) for name, read in inputs.items()})
    lines = (
        tag("polyline", class_="edge", points=" ".join(f"{x:g},{y:g}" for x, y in edge.points))
        for edge in drawing.edges
    )
    placed = [_placed(node, box, drawing.centres[node]) for node, box in boxes.items()]
    return tag(
        "svg",
        *lines,
        *placed,
        width=drawing.width,
        height=drawing.height,
        viewBox=f"0 0 {drawing.width} {drawing.height}",
        role="img",
        aria_label=f"graph of {len(placed)} operators",
    )


def _placed(node: str, box: Mapping[str, Any], centre: tuple[float, float]) -> Element:
    size = {"width": BOX_WIDTH, "height": BOX_HEIGHT}
    x, y = centre
    return tag(
        "g",
        tag("title", box["tip"]),
        tag("rect", **size),
        tag("rect", class_="heat", **size, fill_opacity=box["heat"]),
        tag("text", box["title"], x=BOX_WIDTH / 2, y=17),
        tag("text", box["subtitle"], class_="sub", x=BOX_WIDTH / 2, y=31),
        class_="box",
        id=node,
        transform=f"translate({x - BOX_WIDTH / 2},{y - BOX_HEIGHT / 2})",
    )


def _histogram(row: OperatorError) -> Element:
    """Bars of the float values, over what the integers hold as a band."""
    counted = row.histogram
    assert counted is not None
    step = _WIDTH / max(len(counted.counts), 1)
    heights = (round(height * _HEIGHT, 1) for height in counted.bars())
    bars = (
        tag(
            "rect",
            class_="bar",
            x=round(i * step, 1),
            y=_HEIGHT - h,
            width=round(step, 2),
            height=h,
        )
        for i, h in enumerate(heights)
        if h
    )
    words = "float"
    if row.bounds is not None:
        words = f"integers hold {row.bounds[0]:.4g} to {row.bounds[1]:.4g}"
    if row.clipped is not None:
        words += f"; clipped {percent_text(row.clipped)}, unused {percent_text(row.unused)}"
    plot = tag(
        "svg",
        *_band(row),
        *bars,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"histogram of {row.name}",
    )
    adds = f"{row.kernel or row.operator}, SQNR alone {decibel_text(row.added)}"
    extent = f"values {counted.least:.4g} to {counted.most:.4g}; {words}"
    return tag("div", tag("h3", row.name), soft(adds), plot, soft(extent), class_="panel tensor")


def _band(row: OperatorError) -> list[Element]:
    counted = row.histogram
    if counted is None or row.bounds is None:
        return []
    span = (counted.high - counted.low) or 1.0
    low, high = (_WIDTH * (end - counted.low) / span for end in row.bounds)
    low, high = max(0.0, low), min(float(_WIDTH), high)
    width = round(max(high - low, 0.5), 1)
    return [tag("rect", class_="band", x=round(low, 1), y=0, width=width, height=_HEIGHT)]


def _tip(row: OperatorError) -> str:
    return f"SQNR alone {decibel_text(row.added)}, in all {decibel_text(row.accumulated)}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LABEL else "…" + text[-_LABEL + 1 :]
