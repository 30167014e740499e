"""Comparisons and sensitivities as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import HORIZONTALS
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from backquant.accuracy.comparison import Comparison, OperatorError
from backquant.accuracy.figures import decibel_text
from backquant.accuracy.sensitivity import GroupSensitivity, Sensitivity

GROUP_HEADS = (
    *("operator", "what", "SQNR, it alone quantized", "SQNR, it alone in float", "gain in float"),
)
HEADS = ("operator", "what", "SQNR alone", "SQNR in all", "cosine", "largest", "clipped", "unused")
MEANING = (
    "SQNR in dB, higher is better. Alone: the error that this operator introduces by itself; "
    "in all: with the error of all before it."
)
_FEW = 20


def renderable(found: Comparison | Sensitivity) -> Group:
    """Either, for a rich console.

    >>> len(renderable(Comparison("x86")).renderables)
    1
    """
    return comparison_text(found) if isinstance(found, Comparison) else sensitivity_text(found)


def comparison_text(found: Comparison) -> Group:
    """A line for the outputs, the metric, and the operators that add most."""
    count = batch_count(found.batches)
    outputs = [
        f"output{'' if len(found.outputs) == 1 else f' {output.position}'} {output}"
        for output in found.outputs
    ]
    model = f"{found.model} for " if found.model else ""
    head = f"{model}{found.backend}, {count}: " + (", ".join(outputs) or "no float output")
    parts: list[RenderableType] = [Text(head, style="bold")]
    if found.metric is not None:
        parts.append(
            Text(f"metric: {found.metric[0]:.6g} in float, {found.metric[1]:.6g} quantized")
        )
    if found.rows:
        few = found.worst(_FEW)
        left = len(found.rows) - len(few)
        parts += [Text(""), Text(MEANING), Text(""), _operators(few)]
        if left:
            parts.append(Text(f"{left} more have less error: .to_dict() and .save_html() have all"))
    return Group(*parts)


def sensitivity_text(found: Sensitivity) -> Group:
    """A line for the whole, and the groups that cost most."""
    count = batch_count(found.batches)
    model = f"{found.model} for " if found.model else ""
    level = f"SQNR {decibel_text(found.sqnr)} (higher is better)"
    head = f"{model}{found.backend}, {count}: {level} with everything quantized"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if found.groups:
        ranking = found.ranking()
        parts += [Text(""), _groups(ranking[:_FEW])]
        if len(ranking) > _FEW:
            left = len(ranking) - _FEW
            parts.append(Text(f"{left} more cost less: .to_dict() and .save_html() have all"))
    return Group(*parts)


def _groups(groups: Iterable[GroupSensitivity]) -> Table:
    heads = GROUP_HEADS
    cells = (
        (
            group.name,
            group.operator,
            decibel_text(group.alone),
            decibel_text(group.without),
            f"{group.gain:+.1f} dB",
        )
        for group in groups
    )
    return table(heads, cells)


def _operators(rows: Iterable[OperatorError]) -> Table:
    return table(HEADS, ((row.name, row.kernel or row.operator, *numbers(row)) for row in rows))


def numbers(row: OperatorError) -> tuple[str, ...]:
    """What was measured of an operator, under ``HEADS`` after the first two.

    >>> numbers(OperatorError("n", ("n",), "fc", "Linear", "", False, 31.2, 28.0, 0.999, 0.5, 0.01))
    ('31.2 dB', '28.0 dB', '0.99900', '0.5', '1.0%', '')
    """
    return (
        decibel_text(row.added),
        decibel_text(row.accumulated),
        f"{row.cosine:.5f}",
        f"{row.largest:.3g}",
        percent_text(row.clipped),
        percent_text(row.unused),
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of the kind that reports have; columns after the second are numbers.

    >>> len(table(["a", "b"], [["1", "2"]]).columns)
    2
    """
    made = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, header_style="bold")
    for index, head in enumerate(heads):
        made.add_column(head, overflow="fold", justify="left" if index < 2 else "right")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def percent_text(share: float | None) -> str:
    """A share in percent; nothing where it is not known.

    >>> percent_text(0.125)
    '12.5%'
    """
    return "" if share is None else f"{100 * share:.1f}%"


def batch_count(count: int) -> str:
    """How many batches, in words.

    >>> batch_count(1), batch_count(2)
    ('1 batch', '2 batches')
    """
    return f"{count} batch" + ("" if count == 1 else "es")
