"""The report as one self-contained HTML page: no network, no script from elsewhere."""

from __future__ import annotations

import math
import os
from typing import Any

from backquant import markup
from backquant.files import write_text
from backquant.report import page
from backquant.report.first import (
    headline,
    next_step,
    operator_counts,
    per_sample,
    shortfall,
    speeds,
)
from backquant.report.grouping import by_cost, kernel_counts, refusals, rules_differ
from backquant.report.layout import BOX_HEIGHT, BOX_WIDTH, Drawing, lay_out
from backquant.report.model import Report, Row
from backquant.report.paragraphs import paragraphs
from backquant.report.share import (
    advice,
    computed_once,
    human_bytes,
    percent,
    share_words,
    without_cost,
)

_LABEL_LENGTH = 24
_SHOWN = 6  # reasons by cost
_FOOTER = (
    "Written by backquant. This page needs no network. Drag the graph to move it, turn the wheel to zoom, "
    "click an operator for everything about it; operators that share its qparams are outlined with dashes."
)


def render_html(report: Report) -> str:
    """The page as text.

    >>> "<svg" in render_html(Report("x86", rows=(Row("fc", "Linear", "fc", "quantized"),)))
    True
    """
    rows = report.operators
    drawing = lay_out([row.node for row in rows], _drawn_inputs(report))
    states, counted = page.States.of(rows), page.States.of(report.counted)
    title = report.model or report.backend
    refused = {row.node for row in report.float_rows}
    data = {
        "details": {row.node: _details(row, report.samples) for row in rows},
        "kin": {row.node: _kin(row) for row in rows if _kin(row)},
        "first": _first(report),
        "size": {"width": BOX_WIDTH, "height": BOX_HEIGHT},
    }
    stage = page.drawn(
        (_box(row, drawing) for row in rows),
        (_edge(edge.source, edge.target, edge.points) for edge in drawing.edges),
        (drawing.width, drawing.height),
    )
    return markup.page(
        f"{title} on {report.backend} · backquant",
        markup.Assets("report", ("page.css",), "page.js", data),
        page.header(
            report,
            title,
            shortfall(report),
            _cards(report),
            page.bar(*_shares(report, counted), label=headline(report)),
            next_step(report),
        ),
        markup.tag(
            "main",
            *page.costs(_costly(report), without_cost(refusals(report.float_counted))),
            *page.graph(counted, stage),
            *page.refused(paragraphs(refusals(report.float_counted)), report.backend),
            *page.without_kernel(one for one in report.unlowered if one.node not in refused),
            *page.kernels(kernel_counts(report)),
            *page.operators(report, states, has_rules=rules_differ(report)),
            *page.groups(_groups(report)),
        ),
        markup.tag("footer", _FOOTER),
    )


def save_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page under a temporary name, then rename; folders are made.

    Raises ``UsageError`` where that is not possible.
    """
    write_text(path, render_html(report), "save_html(path)")


def _cards(report: Report) -> list[tuple[str, str, str]]:
    """(title, value, remark) of the numbers at the top."""
    count, _, rest = operator_counts(report).partition(" operators quantized")
    share, words = share_words(report)
    figures = report.figures
    cards = [(words, share, "".join(per_sample(report)))] if words else []
    if figures.sqnr is not None:
        level = "no error" if math.isinf(figures.sqnr) else f"{figures.sqnr:.1f} dB"
        cards.append(("SQNR at the outputs (higher is better)", level, figures.data))
    if figures.metric is not None:
        floating = f"float {figures.float_metric:.4g}" if figures.float_metric is not None else ""
        cards.append(("metric", f"{figures.metric:.4g}", floating))
    if figures.seconds and figures.float_seconds:
        quantized, floating, factor = speeds(report)
        cards.append(("speed", factor.partition(" ")[0], f"{quantized}, float {floating}"))
    if report.float_bytes and report.quantized_bytes:
        ratio = report.float_bytes / report.quantized_bytes
        sizes = f"{human_bytes(report.float_bytes)} → {human_bytes(report.quantized_bytes)}"
        cards.append(("smaller", f"{ratio:.1f}×", sizes))
    cards.append(("operators quantized", count, rest.lstrip(", ") or "none stays float"))
    cards += [(c["title"], c["value"], c.get("remark", "")) for c in report.extras.get("cards", ())]
    return cards


def _shares(report: Report, states: page.States) -> tuple[str, dict[str, float]]:
    """What the bar counts, and the share of each state: of the multiply-adds, where there are any."""
    whole = report.multiply_adds
    if not whole:
        return "operators", {state: count / len(report.counted) for state, count in states.each()}
    rows = report.operators
    done = {state: sum(row.done for row in rows if row.state == state) for state in page.STATES}
    done["float"] = whole - sum(done.values())
    return "multiply-adds", {state: count / whole for state, count in done.items() if count}


def _drawn_inputs(report: Report) -> dict[str, list[str]]:
    """The operators that each operator reads, looking through items of tuples and sizes."""
    known: dict[str, list[str]] = {}
    for row in report.rows:
        sources = (known.get(name, [name]) for name in row.inputs)
        found = list(dict.fromkeys(name for names in sources for name in names))
        known[row.node] = found if row.outcome == "not_tensor" else [row.node]
    return {
        row.node: list(
            dict.fromkeys(name for source in row.inputs for name in known.get(source, [source]))
        )
        for row in report.operators
    }


def _costly(report: Report) -> list[dict[str, Any]]:
    """What stays float and multiplies, the most expensive first, with the share in percent."""
    total = report.multiply_adds or 1
    return [
        {
            "label": group.label,
            "operator": group.operator,
            "node": group.nodes[0],
            "rule": group.reasons[0].rule if group.reasons else "",
            "share": "?" if group.uncounted else percent(group.multiply_adds / total),
            "width": round(100 * group.multiply_adds / total, 1),
            "advice": advice(group),
        }
        for group in by_cost(refusals(report.float_counted))[:_SHOWN]
    ]


def _groups(report: Report) -> list[tuple[str, list[str]]]:
    """What did nothing: titles with their lines, where there are any."""
    groups = [
        ("Notes", [*report.notes, *computed_once(report)]),
        ("Rules of the QConfigMapping that no operator used", list(report.unused_rules)),
        ("Entries of the backend that this model does not reach", list(report.unreached_entries)),
    ]
    return [group for group in groups if group[1]]


def _first(report: Report) -> str | None:
    """The operator to show first: one that stays float, else the one with most multiply-adds."""
    costly = sorted(report.float_rows, key=lambda row: -row.multiply_adds)
    rows = costly or sorted(report.operators, key=lambda row: -row.multiply_adds)
    return rows[0].node if rows else None


def _shorten(text: str) -> str:
    return text if len(text) <= _LABEL_LENGTH else "…" + text[-_LABEL_LENGTH + 1 :]


def _box(row: Row, drawing: Drawing) -> dict[str, Any]:
    x, y = drawing.centres[row.node]
    return {
        "node": row.node,
        "title": _shorten(row.operator),
        "subtitle": _shorten(row.name),
        "state": row.state,
        "x": round(x - BOX_WIDTH / 2, 1),
        "y": round(y - BOX_HEIGHT / 2, 1),
    }


def _edge(source: str, target: str, points: tuple[tuple[float, float], ...]) -> dict[str, str]:
    """A smooth vertical curve through the points."""
    (x0, y0), *rest = points
    parts = [f"M{x0:g},{y0:g}"]
    for x1, y1 in rest:
        middle = (y0 + y1) / 2
        parts.append(f"C{x0:g},{middle:g} {x1:g},{middle:g} {x1:g},{y1:g}")
        x0, y0 = x1, y1
    return {"source": source, "target": target, "path": "".join(parts)}


def _kin(row: Row) -> list[str]:
    """Operators whose outputs have the same qparams by construction."""
    return list(row.output.shared_with) if row.output is not None else []


def _details(row: Row, samples: int) -> list[tuple[str, str]]:
    """(label, text) of what a click on an operator shows; empty ones are left out."""
    cost = f"{row.multiply_adds // samples:,} per sample" if row.multiply_adds else ""
    if row.uncounted:
        cost = f"{cost} not counted: {', '.join(row.uncounted)}".lstrip()
    pairs = [
        ("operator", row.operator),
        ("outcome", page.STATES[row.state]),
        ("module", row.module_path),
        ("fused from", ", ".join(row.fused)),
        ("kernel", row.kernel),
        ("multiply-adds", cost),
        ("entry", row.entry),
        ("dtypes", row.dtype_config),
        ("rule", f"QConfigMapping: {row.rule}" if row.rule else ""),
        ("requested", row.asked.replace("; ", "\n")),
    ]
    for observer in row.observers:
        name = "" if observer.role in ("output", "weight") else f"{observer.value}: "
        shared = f"\nshared with {', '.join(observer.shared_with)}" if observer.shared_with else ""
        pairs.append((observer.role, f"{name}{observer.qparams or 'observed'}{shared}"))
    for reason in row.reasons:
        place = f"\n{reason.place}" if reason.place else ""
        pairs += [
            ("why float", reason.rule),
            ("requested", reason.asked),
            ("supported", f"{reason.admitted}{place}".strip()),
            ("fix", reason.fix),
        ]
    return [pair for pair in pairs if pair[1]]
