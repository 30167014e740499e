"""The report as text for a terminal: summary, table of operators, reasons, what did nothing."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from backquant.report.model import ReasonRow, Report, Row

__all__ = ["human_bytes", "render", "render_text", "renderable", "summary"]

_STYLE = {"quantized": "green", "float": "yellow", "not_tensor": "dim"}


def render_text(report: Report, *, width: int = 120, color: bool = False) -> str:
    """The report as a string of at most ``width`` columns.

    >>> print(render_text(Report("x86", rows=(Row("fc", "Linear", "fc", "quantized"),)), width=60))
    ... # doctest: +ELLIPSIS
    x86 (reference model): 1 of 1 operators quantized...
    """
    return render(renderable(report), width=width, color=color)


def render(shown: RenderableType, *, width: int = 120, color: bool = False) -> str:
    """Anything that rich can print, as a string without trailing blanks.

    >>> render(Text("a table"))
    'a table'
    """
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color)
    console.print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def renderable(report: Report) -> RenderableType:
    """The same for a rich console."""
    parts: list[RenderableType] = [Text(summary(report), style="bold"), operators_table(report)]
    parts += [_refusal(row) for row in report.float_rows]
    parts += [_left(reason) for reason in report.unlowered]
    parts += [Text(f"unused: {rule}") for rule in report.unused_rules]
    parts += [Text(f"note: {note}") for note in report.notes]
    return Group(*parts)


def summary(report: Report) -> str:
    """One line: how much is quantized, and on what it runs."""
    where = report.engine or "reference model"
    line = (
        f"{report.backend} ({where}): {len(report.quantized)} of {len(report.operators)} operators "
        f"quantized"
    )
    if sum(row.multiply_adds for row in report.operators):
        line += f", {report.coverage:.1%} of the multiply-adds"
    if report.float_bytes and report.quantized_bytes:
        ratio = report.float_bytes / report.quantized_bytes
        line += f", {human_bytes(report.float_bytes)} → {human_bytes(report.quantized_bytes)} ({ratio:.1f}×)"
    return line


def human_bytes(count: int) -> str:
    """Bytes in the unit a person would use.

    >>> human_bytes(1_230_000), human_bytes(4_200)
    ('1.23 MB', '4.2 kB')
    """
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def operators_table(report: Report) -> Table:
    """One row per operator: outcome, entry, rule, kernel."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    with_kernels = any(row.kernel for row in report.rows)
    for name in ("node", "operator", "outcome", "entry", "rule"):
        table.add_column(name, overflow="fold")
    if with_kernels:
        table.add_column("kernel", overflow="fold")
    table.add_column("mult-adds", justify="right")
    for row in report.rows:
        cells = [row.node, row.operator, row.outcome, row.entry, row.rule]
        if with_kernels:
            cells.append(row.kernel)
        cells.append(f"{row.multiply_adds:,}" if row.multiply_adds else "")
        table.add_row(*(Text(cell) for cell in cells), style=_STYLE.get(row.outcome, ""))
    return table


def _reason_lines(reason: ReasonRow) -> list[str]:
    lines = [f"  asked     {reason.asked}"] if reason.asked else []
    if reason.admitted:
        lines.append(
            "  admitted  " + reason.admitted + (f"   {reason.place}" if reason.place else "")
        )
    if reason.fix:
        lines.append("  fix       " + reason.fix.replace("\n", "\n            "))
    return lines


def _refusal(row: Row) -> Text:
    head = f"\n{row.node}  {row.operator}  stays float"
    body: list[str] = []
    for reason in row.reasons:
        body.append(f"  rule      {reason.rule}" + (f"   {row.rule}" if row.rule else ""))
        body += _reason_lines(reason)
    return Text("\n".join([head, *body]))


def _left(reason: ReasonRow) -> Text:
    return Text("\n".join([f"\nno integer kernel: {reason.rule}", *_reason_lines(reason)]))
