"""A report in words: whether the model is quantized, how accurate, fast and small it is, what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from backquant.pages import Card
from backquant.reason_codes import ReasonCode, remedy_of
from backquant.report.refusals import Refusal, by_cost, refusals
from backquant.report.rows import Facts, Row

#: Decibels below which the outputs need a look.
LEAST_SQNR = 20.0
_MOSTLY_FLOAT = 0.5
_SHOWN_FLOAT = 0.1  # of the multiply-adds: what is worth a fix
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


def amount(count: float) -> str:
    """A number of multiply-adds in a unit that a person would use.

    >>> amount(950), amount(1_814_073_344)
    ('950', '1.8 G')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f}"


def headline(report: Facts) -> str:
    """One line: which model, whether it is quantized, and how much of it.

    >>> rows = (Row("fc", "Linear", "fc", "float", multiply_adds=4),)
    >>> headline(Facts("x86", model="Net", rows=rows, lowered=True))
    'Net for x86 is in FLOAT: 0.0% of the multiply-adds on integers'
    """
    name = f"{report.model or 'model'} for {report.backend}"
    if short := shortfall(report):
        return f"{name} {short}"
    kind = "" if report.lowered else ", planned" if report.engine else ", reference model"
    return f"{name}{kind}: {share_text(report) or operator_counts(report)}"


def shortfall(report: Facts) -> str:
    """What is to be said where nothing, or less than half of what could be, is quantized; else nothing.

    What could be is all that no rule of the user leaves in float.
    """
    rows = [row for row in report.counted if not _left_by_user(row)]
    if not rows:
        return ""
    whole = sum(row.multiply_adds for row in rows)
    done = sum(row.done for row in rows)
    if not whole:
        is_done = any(row.state in ("quantized", "integers") for row in rows)
        return "" if is_done else "is in FLOAT: no operator is quantized"
    if done >= _MOSTLY_FLOAT * whole:
        return ""
    where = f"of the multiply-adds {_where_it_runs(report)}"
    return f"is {'mostly FLOAT' if done else 'in FLOAT'}: {percent(done / whole)} {where}"


def _left_by_user(row: Row) -> bool:
    return bool(row.rule) and any(why.rule == ReasonCode.QCONFIG_NONE for why in row.reasons)


def share_text(report: Facts) -> str:
    """How much of the multiplying is quantized; empty where nothing multiplies.

    >>> share_text(Facts("x86", not_counted="no example inputs"))
    'an unknown share of the multiply-adds (no example inputs)'
    """
    if report.not_counted:
        return f"an unknown share of the multiply-adds ({report.not_counted})"
    unknown = len(report.uncounted)
    if not report.multiply_adds and not unknown:
        return ""
    text = f"{percent(report.at_most)} of the multiply-adds {_where_it_runs(report)}"
    if not unknown:
        return text
    return f"at most {text} ({'one operator is' if unknown == 1 else f'{unknown} operators are'} not counted)"


def _where_it_runs(report: Facts) -> str:
    """On what the multiply-adds run, or are planned to."""
    done = [row for row in report.operators if row.done]
    others = any(word in row.dtype_config for row in done for word in _NOT_INTEGER)
    kind = "quantized" if others else "on integers"
    if report.lowered:
        return "on quantized kernels" if others else kind
    return f"planned to be {kind}"


def cards(report: Facts) -> Iterator[Card]:
    """What a reader asks first: accuracy, speed, size, work, what it runs on, what to do next."""
    figures = report.figures
    if figures.sqnr is not None:
        yield _accuracy(report, figures.sqnr)
    if figures.metric is not None:
        floating = "" if figures.float_metric is None else f"(float {figures.float_metric:.4g})"
        yield Card("metric", f"{figures.metric:.4g}", floating)
    if figures.seconds and figures.float_seconds:
        times = f"({1e3 * figures.seconds:.3g} ms, float {1e3 * figures.float_seconds:.3g} ms)"
        yield Card("speed", f"{figures.float_seconds / figures.seconds:.1f}× as fast", times)
    if report.float_bytes and report.quantized_bytes:
        ratio = report.float_bytes / report.quantized_bytes
        sizes = f"({human_bytes(report.float_bytes)} → {human_bytes(report.quantized_bytes)})"
        yield Card("size", f"{ratio:.1f}× smaller", sizes)
    if report.operators:
        counts = operator_counts(report)
        if report.multiply_adds:
            counts = f"multiply-adds per sample; {counts}"
            yield Card(
                "work", amount(report.multiply_adds / report.samples), counts, report.at_most
            )
        else:
            yield Card("work", "", counts)
    for extra in report.extras.get("cards", ()):
        yield Card(extra["title"], extra["value"], extra.get("remark", ""))
    if report.engine:
        yield Card("runs on", "", report.engine)
    if report.rows:
        yield Card("next", "", _next_step(report))


def _accuracy(report: Facts, sqnr: float) -> Card:
    figures = report.figures
    remark = f"at the outputs, {figures.data}"
    if figures.worst is not None and len(figures.outputs) > 1:
        remark += f"; lowest {figures.worst[1]:.1f} dB at {figures.worst[0]}"
    if math.isinf(sqnr):
        return Card("accuracy", "no error", remark)
    return Card("accuracy", f"SQNR {sqnr:.1f} dB", f"(higher is better) {remark}")


def operator_counts(report: Facts) -> str:
    """How many operators are quantized, run on integers anyway, and stay float."""
    states = Counter(row.state for row in report.counted)
    parts = [f"{states['quantized']} of {len(report.counted)} operators quantized"]
    if states["integers"]:
        parts.append(f"{states['integers']} more run on integers")
    if states["float"]:
        parts.append(f"{states['float']} stay float")
    return ", ".join(parts)


def _next_step(report: Facts) -> str:
    """The one thing to do now."""
    costly = by_cost(refusals(report.float_counted))
    share = costly[0].multiply_adds / (report.multiply_adds or 1) if costly else 0.0
    if report.library:
        return report.library
    lowest = report.figures.worst or ("", math.inf)
    if min(report.figures.sqnr or math.inf, lowest[1]) < LEAST_SQNR:
        return "backquant.compare(model, quantized, data): which operators cost the accuracy"
    if share > _SHOWN_FLOAT and advice(costly[0]):
        return "the fix of the largest part in float, below"
    if not report.lowered and report.float_bytes:
        return "quantized.export(path): this model is for export; run here, it simulates integers"
    if not report.lowered:
        return "print(report.table()): all operators"
    return "quantized.save(path), quantized.export(path); print(quantized.report.table())"


def advice(group: Refusal) -> str:
    """What to do about operators that stay float: the fix of the reason, else what holds in general."""
    fixes = [reason.fix for reason in group.nearest if reason.fix]
    if fixes or not group.reasons:
        return fixes[0] if fixes else ""
    return remedy_of(group.reasons[0].rule)


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
