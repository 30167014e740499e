"""The report as one self-contained HTML page: no network, no script from elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jinja2

from backquant.report.layout import BOX_HEIGHT, BOX_WIDTH, Drawing, lay_out
from backquant.report.model import Report, Row
from backquant.report.text import human_bytes, summary

__all__ = ["render_html", "save_html"]

_LABEL_LENGTH = 24


def render_html(report: Report) -> str:
    """The page as text.

    >>> "<svg" in render_html(Report("x86", rows=(Row("fc", "Linear", "fc", "quantized"),)))
    True
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("backquant.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = report.rows
    drawing = lay_out([row.node for row in rows], {row.node: row.inputs for row in rows})
    return environment.get_template("page.html.j2").render(
        report=report,
        summary=summary(report),
        cards=_cards(report),
        groups=_groups(report),
        drawing=drawing,
        boxes=[_box(row, drawing) for row in rows],
        edges=[_path(edge.points) for edge in drawing.edges],
        box_width=BOX_WIDTH,
        box_height=BOX_HEIGHT,
        details=_script_json({row.node: _details(row) for row in rows}),
    )


def save_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page under a temporary name, then rename."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(render_html(report), encoding="utf-8")
    temporary.replace(target)


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cards(report: Report) -> list[tuple[str, str, str]]:
    """(title, value, remark) of the numbers at the top."""
    cards = [
        (
            "operators quantized",
            f"{len(report.quantized)} of {len(report.operators)}",
            f"{len(report.float_rows)} stay float",
        )
    ]
    if any(row.multiply_adds for row in report.operators):
        cards.append(("multiply-adds in int8", f"{report.coverage:.1%}", "of the whole model"))
    if report.float_bytes and report.quantized_bytes:
        ratio = report.float_bytes / report.quantized_bytes
        sizes = f"{human_bytes(report.float_bytes)} → {human_bytes(report.quantized_bytes)}"
        cards.append(("smaller", f"{ratio:.1f}×", sizes))
    cards += [(c["title"], c["value"], c.get("remark", "")) for c in report.extras.get("cards", ())]
    return cards


def _groups(report: Report) -> list[tuple[str, list[str]]]:
    """What did nothing: titles with their lines, where there are any."""
    groups = [
        ("QConfigMapping rules that no operator used", list(report.unused_rules)),
        ("Notes", list(report.notes)),
        ("Entries of the backend that this model did not reach", list(report.unreached_entries)),
    ]
    return [group for group in groups if group[1]]


def _shorten(text: str) -> str:
    return text if len(text) <= _LABEL_LENGTH else "…" + text[-_LABEL_LENGTH + 1 :]


def _box(row: Row, drawing: Drawing) -> dict[str, Any]:
    x, y = drawing.centres[row.node]
    return {
        "node": row.node,
        "title": _shorten(row.operator),
        "subtitle": _shorten(row.module_path or row.node),
        "outcome": row.outcome,
        "x": x - BOX_WIDTH / 2,
        "y": y - BOX_HEIGHT / 2,
    }


def _path(points: tuple[tuple[float, float], ...]) -> str:
    """A smooth vertical curve through the points."""
    (x0, y0), *rest = points
    parts = [f"M{x0:g},{y0:g}"]
    for x1, y1 in rest:
        middle = (y0 + y1) / 2
        parts.append(f"C{x0:g},{middle:g} {x1:g},{middle:g} {x1:g},{y1:g}")
        x0, y0 = x1, y1
    return "".join(parts)


def _details(row: Row) -> list[tuple[str, str]]:
    """(label, text) of what a click on an operator shows; empty ones are left out."""
    pairs = [
        ("outcome", row.outcome.replace("_", " ")),
        ("module", row.module_path),
        ("fused from", ", ".join(row.fused)),
        ("entry", row.entry),
        ("dtype config", row.dtype_config),
        ("rule", row.rule),
        ("asked", row.asked),
        ("observers", "\n".join(row.observers)),
        ("qparams", row.qparams),
        ("kernel", row.kernel),
        ("multiply-adds", f"{row.multiply_adds:,}" if row.multiply_adds else ""),
    ]
    for reason in row.reasons:
        pairs += [
            ("why float", reason.rule),
            ("asked", reason.asked),
            ("admitted", reason.admitted + (f"\n{reason.place}" if reason.place else "")),
            ("fix", reason.fix),
        ]
    return [pair for pair in pairs if pair[1]]
