"""The share of the multiply-adds that is quantized, in words; and what the rest is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from backquant.reason_codes import remedy_of
from backquant.report.grouping import Refusal, by_cost, refusals
from backquant.report.model import Report

_SHOWN = 6  # reasons by cost
_KINDS = 8  # operators without multiply-adds, by kind
_NOT_INTEGER = ("float16", "float8", "weight only")


def percent(part: float) -> str:
    """A share; no rounding to all or nothing.

    >>> percent(0.5), percent(0.99999), percent(1), percent(0.00001), percent(0), percent(math.nan)
    ('50.0%', '99.9%', '100.0%', '0.1%', '0.0%', 'unknown')
    """
    if math.isnan(part):
        return "unknown"
    if 0 < part < 1:
        part = min(max(part, 0.001), 0.999)
    return f"{part:.1%}"


def human_bytes(count: int) -> str:
    """Bytes in the unit a person would use.

    >>> human_bytes(1_230_000), human_bytes(4_200)
    ('1.23 MB', '4.2 kB')
    """
    return f"{count / 1e6:.2f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def share_text(report: Report) -> str:
    """How much of the multiplying is quantized; empty where nothing multiplies.

    >>> share_text(Report("x86", not_counted="no example inputs"))
    'an unknown share of the multiply-adds (no example inputs)'
    """
    share, words = share_words(report)
    return f"{share} {words}" if words else ""


def share_words(report: Report) -> tuple[str, str]:
    """The share, and what it is a share of; both are empty where nothing multiplies.

    >>> from backquant.report.model import Row
    >>> rows = (Row("fc", "Linear", "fc", "quantized", multiply_adds=4),)
    >>> share_words(Report("x86", rows=rows, lowered=True))
    ('100.0%', 'of the multiply-adds on integers')
    """
    if report.not_counted:
        return "an unknown share", f"of the multiply-adds ({report.not_counted})"
    unknown = len(report.uncounted)
    if not report.multiply_adds and not unknown:
        return "", ""
    share, words = percent(report.at_most), f"of the multiply-adds {where_it_runs(report)}"
    if not unknown:
        return share, words
    operators = "one operator is" if unknown == 1 else f"{unknown} operators are"
    return f"at most {share}", f"{words} ({operators} not counted)"


def computed_once(report: Report) -> list[str]:
    """What of the model its graph no longer computes, as a line; none if it computes all."""
    if not report.computed_once:
        return []
    return [
        f"{report.computed_once:,} multiply-adds of the model are not in its graph: they do not depend "
        "on the inputs and are computed once"
    ]


def where_it_runs(report: Report) -> str:
    """On what the multiply-adds run, or are planned to."""
    done = [row for row in report.operators if row.done]
    others = any(word in row.dtype_config for row in done for word in _NOT_INTEGER)
    kind = "quantized" if others else "on integers"
    if report.lowered:
        return "on quantized kernels" if others else kind
    return f"planned to be {kind}"


def float_by_cost(report: Report) -> Iterator[str]:
    """What stays float, the largest share first, and what to do about the largest."""
    groups = refusals(report.float_counted)
    costly = by_cost(groups)
    total = report.multiply_adds or 1
    if costly:
        yield "in float, by share of the multiply-adds:"
    for group in costly[:_SHOWN]:
        share = "?" if group.uncounted else percent(group.multiply_adds / total)
        rule = group.reasons[0].rule if group.reasons else "no reason given"
        yield f"  {share:>6}  {group.label}  {group.operator}: {rule}"
    if len(costly) > _SHOWN:
        rest = sum(group.multiply_adds for group in costly[_SHOWN:]) / total
        yield f"  {percent(rest):>6}  {len(costly) - _SHOWN} more reasons"
    if costly:
        yield from _largest(costly[0])
    free = without_cost(groups)
    if free:
        yield f"in float, without multiply-adds: {free}"


def _largest(group: Refusal) -> Iterator[str]:
    yield "about the largest:"
    reason = group.nearest[0] if group.nearest else None
    if reason is not None and reason.admitted:
        yield f"  supported {reason.admitted}" + (f"   {reason.place}" if reason.place else "")
    todo = advice(group)
    if todo:
        yield "  fix       " + todo.replace("\n", "\n            ")


def advice(group: Refusal) -> str:
    """What to do about operators that stay float: the fix of the reason, else what holds in general."""
    for reason in group.nearest:
        if reason.fix:
            return reason.fix
    return remedy_of(group.reasons[0].rule) if group.reasons else ""


def without_cost(groups: Iterable[Refusal]) -> str:
    """How many operators of each kind multiply nothing, the most frequent first.

    >>> without_cost([Refusal("add", "", ("a", "b"), ("a", "b"), ()), Refusal("mul", "", (), ("c",), ())])
    '2 add, 1 mul'
    """
    counts: Counter[str] = Counter()
    for group in groups:
        if not group.multiply_adds and not group.uncounted:
            counts[group.operator] += len(group.nodes)
    shown = [f"{count} {operator}" for operator, count in counts.most_common(_KINDS)]
    rest = sum(counts.values()) - sum(count for _, count in counts.most_common(_KINDS))
    return ", ".join([*shown, *([f"{rest} others"] if rest else [])])
