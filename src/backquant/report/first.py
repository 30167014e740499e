"""What a reader of a report asks first, and the answers: for text, page and the line on standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backquant.reason_codes import ReasonCode
from backquant.report.grouping import by_cost, refusals
from backquant.report.model import Report, Row
from backquant.report.share import advice, human_bytes, percent, share_text, where_it_runs

#: Decibels below which the outputs need a look.
LEAST_SQNR = 20.0
_MOSTLY_FLOAT = 0.5
_SHOWN_FLOAT = 0.1  # of the multiply-adds: what is worth a fix


def headline(report: Report) -> str:
    """One line: which model, whether it is quantized, and how much of it.

    >>> rows = (Row("fc", "Linear", "fc", "float", multiply_adds=4),)
    >>> headline(Report("x86", model="Net", rows=rows, lowered=True))
    'Net for x86 is in FLOAT: 0.0% of the multiply-adds on integers'
    """
    name = f"{report.model or 'model'} for {report.backend}"
    if short := shortfall(report):
        return f"{name} {short}"
    kind = "" if report.lowered else ", planned" if report.engine else ", reference model"
    return f"{name}{kind}: {share_text(report) or operator_counts(report)}"


def shortfall(report: Report) -> str:
    """What is to be said where nothing, or less than half of what could be, is quantized; else nothing.

    What could be is all that no rule of the user leaves in float.
    """
    rows = [row for row in report.counted if not _left_by_user(row)]
    if not rows:
        return ""
    whole = sum(row.multiply_adds for row in rows)
    done = sum(row.done for row in rows)
    if not whole:
        whole, done = len(rows), sum(row.state in ("quantized", "integers") for row in rows)
        return "" if done else "is in FLOAT: no operator is quantized"
    if done >= _MOSTLY_FLOAT * whole:
        return ""
    where = f"of the multiply-adds {where_it_runs(report)}"
    return f"is {'mostly FLOAT' if done else 'in FLOAT'}: {percent(done / whole)} {where}"


def _left_by_user(row: Row) -> bool:
    return bool(row.rule) and any(why.rule == ReasonCode.QCONFIG_NONE for why in row.reasons)


def answers(report: Report) -> Iterator[tuple[str, str]]:
    """(question in a word, answer): accuracy, speed, size, work, what it runs on, what to do next."""
    figures = report.figures
    if figures.sqnr is not None or figures.metric is not None:
        yield "accuracy", "; ".join(_accuracy(report))
    if figures.seconds and figures.float_seconds:
        yield "speed", "{}, float {}: {}".format(*speeds(report))
    if report.float_bytes and report.quantized_bytes:
        ratio = report.float_bytes / report.quantized_bytes
        sizes = f"{human_bytes(report.float_bytes)} → {human_bytes(report.quantized_bytes)}"
        yield "size", f"{sizes} ({ratio:.1f}×)"
    if report.operators:
        yield "work", "; ".join([*per_sample(report), operator_counts(report)])
    if report.engine:
        yield "runs on", report.engine
    if report.rows:
        yield "next", next_step(report)


def _accuracy(report: Report) -> Iterator[str]:
    figures = report.figures
    if figures.metric is not None:
        floating = f", float {figures.float_metric:.4g}" if figures.float_metric is not None else ""
        yield f"metric {figures.metric:.4g}{floating}"
    if figures.sqnr is not None:
        exact = math.isinf(figures.sqnr)
        level = "no error" if exact else f"SQNR {figures.sqnr:.1f} dB (higher is better)"
        yield f"{level} at the outputs, {figures.data}"
    worst = figures.worst
    if worst is not None and len(figures.outputs) > 1:
        yield f"lowest {worst[1]:.1f} dB at {worst[0]}"


def speeds(report: Report) -> tuple[str, str, str]:
    """Times of a call, quantized and in float, and how many times as fast it is."""
    quantized, floating = (
        report.figures.seconds or math.nan,
        report.figures.float_seconds or math.nan,
    )
    factor = floating / quantized
    return f"{1e3 * quantized:.3g} ms", f"{1e3 * floating:.3g} ms", f"{factor:.1f}× as fast"


def per_sample(report: Report) -> Iterator[str]:
    """The multiply-adds of one sample in words, if they are known.

    >>> rows = (Row("fc", "Linear", "fc", "float", multiply_adds=4_000_000),)
    >>> list(per_sample(Report("x86", rows=rows, samples=2)))
    ['2.0 M multiply-adds per sample']
    """
    if report.multiply_adds:
        yield f"{amount(report.multiply_adds / report.samples)} multiply-adds per sample"


def amount(count: float) -> str:
    """A number of multiply-adds in a unit that a person would use.

    >>> amount(950), amount(1_814_073_344)
    ('950', '1.8 G')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f}"


def operator_counts(report: Report) -> str:
    """How many operators are quantized, run on integers anyway, and stay float."""
    rows = report.counted
    states = [row.state for row in rows]
    parts = [f"{states.count('quantized')} of {len(rows)} operators quantized"]
    if states.count("integers"):
        parts.append(f"{states.count('integers')} more run on integers")
    if states.count("float"):
        parts.append(f"{states.count('float')} stay float")
    return ", ".join(parts)


def next_step(report: Report) -> str:
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
