"""Comparisons and sensitivities as a self-contained page: graph coloured by loss, ranking, histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from backquant.accuracy.comparison import Comparison, OperatorError
from backquant.accuracy.figures import decibel_text
from backquant.accuracy.sensitivity import Sensitivity
from backquant.accuracy.text import HEADS, batch_count, numbers, percent_text
from backquant.report.layout import BOX_HEIGHT, BOX_WIDTH, lay_out
from backquant.report.template import page_template

_LABEL = 24
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
    cards = [("output", decibel_text(found.sqnr), batch_count(found.batches))]
    if found.metric is not None:
        cards.append(("metric", f"{found.metric[1]:.5g}", f"{found.metric[0]:.5g} in float"))
    clipped = [row for row in found.rows if row.clipped]
    cards.append(("values clipped", f"{len(clipped)}", f"of {len(found.rows)} tensors"))
    rows = [
        (row.node, (row.name, row.kernel or row.operator), numbers(row), heat(row.added))
        for row in found.worst(len(found.rows))
    ]
    tensors = [_histogram(row) for row in found.worst(10) if row.histogram is not None]
    return _page(
        title=found.model or found.backend,
        backend=found.backend,
        what="quantized beside float",
        legend="Colour: the error that an operator adds, when what it reads is right.",
        cards=cards,
        heads=HEADS,
        rows=rows,
        tensors=tensors,
        drawing=_drawing(boxes, found.inputs),
    )


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
    return _page(
        title=found.model or found.backend,
        backend=found.backend,
        what="what each operator costs",
        legend="Colour: the error of the outputs when nothing else is quantized.",
        cards=[
            ("everything quantized", decibel_text(found.sqnr), batch_count(found.batches)),
            ("groups", str(len(found.groups)), "operators that are quantized together"),
        ],
        heads=("operator", "what", "quantized alone", "left float alone", "gives back"),
        rows=rows,
        tensors=[],
        drawing=_drawing(boxes, found.inputs),
    )


def heat(sqnr: float) -> float:
    """From 0 (no error to speak of) to 1.

    >>> heat(60.0), heat(30.0), heat(-3.0)
    (0.0, 0.5, 1.0)
    """
    if math.isinf(sqnr):
        return 0.0 if sqnr > 0 else 1.0
    return round(min(1.0, max(0.0, (_BEST - sqnr) / (_BEST - _WORST))), 3)


def _page(**values: Any) -> str:
    return page_template("accuracy").render(box_width=BOX_WIDTH, box_height=BOX_HEIGHT, **values)


def _box(title: str, subtitle: str, sqnr: float, tip: str) -> dict[str, Any]:
    return {
        "title": _shorten(title),
        "subtitle": _shorten(subtitle),
        "heat": heat(sqnr),
        "tip": tip,
    }


def _drawing(
    boxes: Mapping[str, dict[str, Any]], inputs: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    drawing = lay_out(list(boxes), {name: list(read) for name, read in inputs.items()})
    placed = []
    for node, box in boxes.items():
        x, y = drawing.centres[node]
        placed.append({**box, "node": node, "x": x - BOX_WIDTH / 2, "y": y - BOX_HEIGHT / 2})
    lines = [" ".join(f"{x:g},{y:g}" for x, y in edge.points) for edge in drawing.edges]
    return {"boxes": placed, "lines": lines, "width": drawing.width, "height": drawing.height}


def _histogram(row: OperatorError) -> dict[str, Any]:
    """Bars of the float values, and what the integers hold as a band behind them."""
    counted = row.histogram
    assert counted is not None
    span = (counted.high - counted.low) or 1.0
    step = _WIDTH / max(len(counted.counts), 1)
    bars = [
        {"x": round(i * step, 1), "height": round(height * _HEIGHT, 1)}
        for i, height in enumerate(counted.bars())
    ]
    band = None
    if row.bounds is not None:
        low, high = (_WIDTH * (end - counted.low) / span for end in row.bounds)
        low, high = max(0.0, low), min(float(_WIDTH), high)
        band = {"x": round(low, 1), "width": round(max(high - low, 0.5), 1)}
    return {
        "name": row.name,
        "what": row.kernel or row.operator,
        "added": decibel_text(row.added),
        "range": "float"
        if row.bounds is None
        else f"integers hold {row.bounds[0]:.4g} to {row.bounds[1]:.4g}",
        "extent": f"values {counted.least:.4g} to {counted.most:.4g}",
        "clipped": percent_text(row.clipped),
        "unused": percent_text(row.unused),
        "bars": bars,
        "band": band,
        "step": round(step, 2),
    }


def _tip(row: OperatorError) -> str:
    return f"adds {decibel_text(row.added)}, accumulated {decibel_text(row.accumulated)}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LABEL else "…" + text[-_LABEL + 1 :]
