"""The report: its rows and totals, read from and written as data, and shown."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from backquant.figures import Figures
from backquant.pages import Document, Section, Shown
from backquant.report.document import document_of, operators_of
from backquant.report.rows import Facts, ObserverRow, ReasonRow, Row

__all__ = ["ObserverRow", "ReasonRow", "Report", "Row"]


class Report(Facts, Shown):
    """What each operator became, and why; totals; and what did nothing. Print it, or ``save_html``.

    >>> print(Report("x86", rows=(Row("fc", "Linear", "fc", "quantized"),)))  # doctest: +ELLIPSIS
    model for x86, reference model: 1 of 1 operators quantized...
    """

    def document(self) -> Document:
        """What came out, what stays float, and why. ``table`` has the operators."""
        return document_of(self)

    def table(self, *, width: int = 140, color: bool = False) -> str:
        """All operators with their dtypes, measured outputs and kernels, as text."""
        from backquant.pages.text import render

        return render(self.operators_section(), width=width, color=color)

    def operators_section(self) -> Section:
        """The same as a part of a document."""
        return Section("", operators_of(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``from_dict`` reads it back to an equal report."""
        data = asdict(self)
        data["coverage"] = None if math.isnan(self.coverage) else self.coverage
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Inverse of ``to_dict``.

        >>> report = Report("x86", rows=(Row("a", "Conv2d", "a", "float"),))
        >>> Report.from_dict(report.to_dict()) == report
        True
        """
        fields = {key: value for key, value in data.items() if key != "coverage"}
        fields["figures"] = Figures(**fields.get("figures", {}))
        fields["rows"] = tuple(_row(row) for row in fields.get("rows", ()))
        fields["unlowered"] = tuple(ReasonRow(**reason) for reason in fields.get("unlowered", ()))
        for key in ("unused_rules", "notes", "unreached_entries", "kernels"):
            fields[key] = tuple(fields.get(key, ()))
        return cls(**fields)


def _row(data: dict[str, Any]) -> Row:
    fields = dict(data)
    fields["reasons"] = tuple(ReasonRow(**reason) for reason in fields.get("reasons", ()))
    fields["observers"] = tuple(_observer(observer) for observer in fields.get("observers", ()))
    for key in ("inputs", "fused", "uncounted"):
        fields[key] = tuple(fields.get(key, ()))
    return Row(**fields)


def _observer(data: dict[str, Any]) -> ObserverRow:
    return ObserverRow(**{**data, "shared_with": tuple(data["shared_with"])})
