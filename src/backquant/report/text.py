"""The report as text for a terminal.

First whether the model is quantized, how accurate, how fast and how small it is, and what to do next; then
what stays float by cost, kernels, what did nothing, and all reasons. The table of operators is a text of its
own.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from textwrap import wrap

from rich.box import HORIZONTALS
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from backquant.report.console import SafeConsole
from backquant.report.first import answers, headline
from backquant.report.grouping import (
    dtype_letters,
    kernel_counts,
    refusals,
    rules_differ,
)
from backquant.report.model import ReasonRow, Report, Row
from backquant.report.paragraphs import Paragraph, paragraphs
from backquant.report.share import computed_once, float_by_cost

_STYLE = {"quantized": "green", "integers": "cyan", "float": "yellow", "not_tensor": "dim"}
_KEPT = "\0"  # a space at which no line ends
_FEW = 8  # entries that no operator reached: more are told by the page and by ``unreached_entries``


def render_text(report: Report, *, width: int = 140, color: bool = False) -> str:
    """The report as a string; tables have at most ``width`` columns.

    >>> print(render_text(Report("x86", rows=(Row("fc", "Linear", "fc", "quantized"),)), width=60))
    ... # doctest: +ELLIPSIS
    model for x86, reference model: 1 of 1 operators quantized...
    """
    return render(renderable(report), width=width, color=color)


def render(shown: RenderableType, *, width: int = 140, color: bool = False) -> str:
    """Anything that rich can print, as a string without trailing blanks.

    >>> render(Text("a table"))
    'a table'
    """
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=width, force_terminal=color, no_color=not color)
    for part in _parts(shown):
        console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _parts(shown: RenderableType) -> Iterator[RenderableType]:
    if not isinstance(shown, Group):
        yield shown
        return
    for part in shown.renderables:
        yield from _parts(part)


def render_table(report: Report, *, width: int = 140, color: bool = False) -> str:
    """The operators as a string, with what their letters stand for."""
    return render(Group(*table_parts(report)), width=width, color=color)


def table_parts(report: Report) -> list[RenderableType]:
    """The same for a rich console."""
    letters = dtype_letters(report)
    parts: list[RenderableType] = [Text(f"{letter}  {text}") for text, letter in letters.items()]
    if report.operators:
        parts += [Text(""), operators_table(report, letters)]
    return [*parts, *_lines(_marks(report))]


def renderable(report: Report) -> Group:
    """The same for a rich console."""
    parts: list[RenderableType] = [
        Text(headline(report), style="bold"),
        *_lines(first_lines(report)),
    ]
    first = list(float_by_cost(report))
    parts += _lines(["", *first] if first else [])
    parts += _lines(_notes(report))
    said = paragraphs(refusals(report.float_counted))
    parts += [_paragraph(paragraph, report.backend) for paragraph in said]
    shown = {row.node for row in report.float_rows}
    parts += [_left(reason) for reason in report.unlowered if reason.node not in shown]
    return Group(*parts)


def first_lines(report: Report) -> Iterator[str]:
    """What a reader asks first, a line for each answer."""
    for name, words in answers(report):
        yield from wrap(words, 79, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)


def operators_table(report: Report, letters: dict[str, str]) -> Table:
    """One row per operator: dtypes by letter, measured output, rule, kernel, multiply-adds of a sample."""
    rows = report.operators
    columns = {
        "node": [row.node for row in rows],
        "operator": [_operator(row) for row in rows],
        "as": [_as(row, letters) for row in rows],
        "rule": [row.rule for row in rows],
        "output qparams": ["" if row.output is None else row.output.short for row in rows],
        "kernel": [row.kernel for row in rows],
        "mult-adds": [_cost(row, report.samples) for row in rows],
    }
    if not rules_differ(report):
        del columns["rule"]
    table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, header_style="bold")
    used = {name: cells for name, cells in columns.items() if any(cells)}
    for name in used:
        table.add_column(name, overflow="fold", justify="right" if name == "mult-adds" else "left")
    for row, cells in zip(rows, zip(*used.values(), strict=True), strict=True):
        table.add_row(*map(Text, cells), style=_STYLE.get(row.state, ""))
    return table


def _operator(row: Row) -> str:
    """The operator, and what else the pattern that matched consists of."""
    parts = row.entry.split(", ")
    if row.operator not in parts:
        return f"{row.operator} in {row.entry}" if row.entry else row.operator
    parts.remove(row.operator)
    return " with ".join([row.operator, *([", ".join(parts)] if parts else [])])


def _cost(row: Row, samples: int) -> str:
    counted = f"{row.multiply_adds // samples:,}" if row.multiply_adds else ""
    return f"{counted} + ?".removeprefix(" + ") if row.uncounted else counted


def _as(row: Row, letters: dict[str, str]) -> str:
    words = {"integers": "float*", "float": "float", "not_tensor": "–"}
    return letters.get(row.dtype_config, "?") if row.quantized else words[row.state]


def _lines(texts: Iterable[str]) -> list[Text]:
    return [Text(text) for text in texts]


def _marks(report: Report) -> Iterator[str]:
    if report.on_integers:
        yield ""
        yield "* float in the plan, run by an integer kernel"
    if any(row.output is not None and row.output.shared_with for row in report.rows):
        yield ""
        yield "= x +n: shares scale and zero point with x and n others"


def _notes(report: Report) -> Iterator[str]:
    if report.kernels:
        yield ""
        counts = (
            f"{n} × {kernel}".replace(" ", _KEPT) for kernel, n in kernel_counts(report).items()
        )
        lines = wrap("kernels: " + ", ".join(counts), 79, subsequent_indent="         ")
        yield from (line.replace(_KEPT, " ") for line in lines)
    few = report.unreached_entries if len(report.unreached_entries) <= _FEW else ()
    if report.unused_rules or report.notes or few or report.computed_once:
        yield ""
    yield from (f"unused: {rule}" for rule in report.unused_rules)
    yield from (f'entry "{entry}": no operator reaches it' for entry in few)
    yield from (f"note: {note}" for note in (*report.notes, *computed_once(report)))


def _reason_lines(reason: ReasonRow) -> list[str]:
    lines = [f"  requested {reason.asked}"] if reason.asked else []
    if reason.admitted:
        place = f"   {reason.place}" if reason.place else ""
        lines.append(f"  supported {reason.admitted}{place}")
    elif reason.place:
        lines.append(f"  where     {reason.place}")
    if reason.fix:
        lines.append("  fix       " + reason.fix.replace("\n", "\n            "))
    return lines


def _paragraph(paragraph: Paragraph, backend: str) -> Text:
    verb = "stays" if paragraph.count == 1 else "stay"
    rule = f"   QConfigMapping: {paragraph.rule}" if paragraph.rule else ""
    lines = [f"\n{paragraph.title}  {verb} float"]
    for reason in paragraph.reasons:
        lines += [f"  rule      {reason.rule}{rule}", *_reason_lines(reason)]
    if paragraph.has_no_entry:
        lines.append(f"  supported {backend} has no entry for any of:")
    several = len(paragraph.refusals) > 1
    for part in paragraph.parts:
        differing = paragraph.differing(part)
        lines += [f"            {differing}:"] if differing else []
        indent = " " * (14 if differing else 12)
        lines += [f"{indent}{r.operator}  {r.label}" for r in part.refusals if several]
    return Text("\n".join(lines))


def _left(reason: ReasonRow) -> Text:
    head = f"\n{reason.node or 'an operator'}  is quantized, and has no integer kernel"
    return Text("\n".join([head, f"  rule      {reason.rule}", *_reason_lines(reason)]))
