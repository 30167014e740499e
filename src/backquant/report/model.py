"""The report as data: what became of every operator, and why. Rendered by the siblings of this file.

Invariants

1. One row per operator of the fused graph, in graph order.
2. A row that stays float has at least one reason.
3. Totals are sums over the rows; nothing is counted that has no row.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ReasonRow", "Report", "Row"]


@dataclass(frozen=True)
class ReasonRow:
    """Why something was refused: the rule, what was asked, what is admitted, and the fix in code."""

    rule: str
    asked: str
    admitted: str
    fix: str = ""
    place: str = ""


@dataclass(frozen=True)
class Row:
    """One operator."""

    node: str
    operator: str
    module_path: str
    outcome: str  # "quantized", "float" or "not_tensor"
    inputs: tuple[str, ...] = ()  # nodes whose values it reads, for drawing
    entry: str = ""  # the pattern of the backend's entry that matched
    dtype_config: str = ""
    rule: str = ""  # which rule of the QConfigMapping applied
    asked: str = ""
    observers: tuple[str, ...] = ()  # e.g. "output HistogramObserver, shared with pool1, cat"
    qparams: str = ""  # measured scale and zero point of the output
    kernel: str = ""  # what runs it; "" before lowering
    fused: tuple[str, ...] = ()  # nodes of the original graph that became this one
    multiply_adds: int = 0
    reasons: tuple[ReasonRow, ...] = ()

    @property
    def quantized(self) -> bool:
        return self.outcome == "quantized"


@dataclass(frozen=True)
class Report:
    """What each operator became, and why; totals; and what did nothing."""

    backend: str
    engine: str = ""  # engine and instruction set; "" for a reference model
    rows: tuple[Row, ...] = ()
    unused_rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unreached_entries: tuple[str, ...] = ()
    unlowered: tuple[ReasonRow, ...] = ()  # quantized by the plan, yet no integer kernel runs it
    float_bytes: int = 0
    quantized_bytes: int = 0
    extras: dict[str, Any] = field(default_factory=dict)  # e.g. accuracy and latency of the demo

    @property
    def operators(self) -> tuple[Row, ...]:
        """Rows that compute on tensors."""
        return tuple(row for row in self.rows if row.outcome != "not_tensor")

    @property
    def quantized(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.quantized)

    @property
    def float_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.outcome == "float")

    @property
    def coverage(self) -> float:
        """Share of multiply-adds in quantized operators; of operators, where nothing multiplies.

        >>> rows = (Row("a", "Conv2d", "a", "quantized", multiply_adds=30),
        ...         Row("b", "Linear", "b", "float", multiply_adds=10))
        >>> Report("x86", rows=rows).coverage
        0.75
        """
        total = sum(row.multiply_adds for row in self.operators)
        if total:
            return sum(row.multiply_adds for row in self.quantized) / total
        return len(self.quantized) / len(self.operators) if self.operators else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``from_dict`` reads it back to an equal report."""
        data = asdict(self)
        data["coverage"] = self.coverage
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Inverse of ``to_dict``.

        >>> report = Report("x86", rows=(Row("a", "Conv2d", "a", "float"),))
        >>> Report.from_dict(report.to_dict()) == report
        True
        """
        fields = {key: value for key, value in data.items() if key != "coverage"}
        fields["rows"] = tuple(_row(row) for row in fields.get("rows", ()))
        fields["unlowered"] = tuple(ReasonRow(**reason) for reason in fields.get("unlowered", ()))
        for key in ("unused_rules", "notes", "unreached_entries"):
            fields[key] = tuple(fields.get(key, ()))
        return cls(**fields)

    def render(self, *, width: int = 120, color: bool = False) -> str:
        """The report as text: a summary, a table of operators, and the reasons."""
        from backquant.report.text import render_text

        return render_text(self, width=width, color=color)

    def __str__(self) -> str:
        return self.render()

    def to_html(self) -> str:
        """One self-contained page that works offline."""
        from backquant.report.html import render_html

        return render_html(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path`` (under a temporary name first)."""
        from backquant.report.html import save_html

        save_html(self, path)


def _row(data: dict[str, Any]) -> Row:
    fields = dict(data)
    fields["reasons"] = tuple(ReasonRow(**reason) for reason in fields.get("reasons", ()))
    for key in ("inputs", "observers", "fused"):
        fields[key] = tuple(fields.get(key, ()))
    return Row(**fields)
