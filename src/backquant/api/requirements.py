"""Failing closed: too little quantized is an error that lists the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from backquant.errors import CoverageError, UsageError
from backquant.report.model import Report, Row

__all__ = ["check_requirement"]

_SHOWN = 12


def check_requirement(report: Report, require: float | Sequence[str] | None) -> None:
    """Raise ``CoverageError`` when ``report`` has less quantized than ``require`` asks for.

    ``require`` is a share of the multiply-adds (0 to 1), or dotted module paths; ``None`` asks for
    any operator at all.

    >>> rows = (Row("fc", "Linear", "fc", "quantized"),)
    >>> check_requirement(Report("x86", rows=rows), 0.5)
    >>> check_requirement(Report("x86"), None)
    Traceback (most recent call last):
        ...
    backquant.errors.CoverageError: nothing in this model can be quantized for x86
    """
    if isinstance(require, str):
        require = (require,)
    if isinstance(require, Sequence):
        _check_modules(report, require)
    elif require is not None:
        _check_share(report, require)
    if not report.quantized:
        raise CoverageError(
            f"nothing in this model can be quantized for {report.backend}",
            where=_refusals(report.float_rows),
            fix="print(backquant.explain(model, example_inputs, backend=...)) has every reason"
            if report.float_rows
            else "",
        )


def _check_share(report: Report, share: float) -> None:
    if isinstance(share, bool) or not 0 <= share <= 1:
        raise UsageError(
            f"require={share!r} is not a share between 0 and 1",
            fix='require=0.9 for 90% of the multiply-adds, or require=["encoder.fc"] for modules',
        )
    if report.coverage < share:
        refused = sorted(report.float_rows, key=lambda row: -row.multiply_adds)
        raise CoverageError(
            f"{report.coverage:.1%} of the multiply-adds can be quantized for {report.backend}, "
            f"and {share:.1%} is required",
            where=_refusals(refused),
            fix="apply the fixes above, or lower require",
        )


def _check_modules(report: Report, names: Sequence[str]) -> None:
    for name in names:
        rows = [row for row in report.operators if _inside(row, name)]
        if not rows:
            paths = {row.module_path for row in report.rows}
            near = get_close_matches(name, paths, 3)
            raise UsageError(
                f"no operator of the model is in a module {name!r}",
                where="require",
                fix="did you mean " + " or ".join(map(repr, near)) + "?" if near else "",
            )
        refused = [row for row in rows if not row.quantized]
        if refused:
            raise CoverageError(
                f"{name!r} is required to be quantized, and stays float on {report.backend}",
                where=_refusals(refused),
                fix="apply the fix above, or take it out of require",
            )


def _inside(row: Row, name: str) -> bool:
    return row.module_path == name or row.module_path.startswith(name + ".")


def _refusals(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows[:_SHOWN]:
        reason = row.reasons[0] if row.reasons else None
        text = f"{row.module_path or row.node} ({row.operator})"
        if reason is not None:
            text += f": {reason.rule}"
            if reason.asked:
                text += f", asked {reason.asked}"
            if reason.admitted:
                text += f", admitted {reason.admitted}"
        lines.append(text)
    if len(rows) > _SHOWN:
        lines.append(f"… and {len(rows) - _SHOWN} more")
    return "\n         ".join(lines)
