"""The report: its rows and totals, read from and written as data, and shown."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from torch import fx

from backquant.calibrate import prepared_parts
from backquant.errors import CoverageError, UsageError, did_you_mean
from backquant.json_text import from_plain_data
from backquant.match import Plan
from backquant.match.float_policy import left_by_default
from backquant.pages import Document, Section, Shown
from backquant.prepare import prepared_state
from backquant.report.document import document_of, operators_of, percent
from backquant.report.refusals import collapsed
from backquant.report.rows import Facts, ObserverRow, ReasonRow, Row

__all__ = ["ObserverRow", "ReasonRow", "Report", "Row"]


class Report(Facts, Shown):
    """What each operator became, and why; totals; and what did nothing. Print it, or ``save_html``.

    >>> print(Report("x86", rows=(Row("fc", "Linear", "fc", "quantized"),)))  # doctest: +ELLIPSIS
    model for x86, reference model: 1 of 1 operators quantized...
    """

    def __repr__(self) -> str:
        """The first line; ``print`` shows all."""
        return f"<{str(self).partition(chr(10))[0]}>"

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
        made: Report = from_plain_data(cls, fields)
        return made


# Failing closed: too little quantized is an error that lists the reasons.

_SHOWN = 8  # reasons in a message
_NAMED = 4  # operators of a reason


def given_requirement(require: Any) -> float | tuple[str, ...] | None:
    """``require`` as a share or as module names. Raises ``UsageError`` for anything else.

    >>> given_requirement("encoder.fc"), given_requirement(1)
    (('encoder.fc',), 1.0)
    """
    if require is None:
        return None
    if isinstance(require, str):
        return (require,)
    if isinstance(require, Collection) and all(isinstance(name, str) for name in require):
        return tuple(require)
    is_number = isinstance(require, int | float) and not isinstance(require, bool)
    if is_number and 0 <= require <= 1:
        return float(require)
    raise UsageError(
        f"require={require!r} is not a share between 0 and 1",
        where="require",
        fix="require=0.9   # 90% of the multiply-adds; or the paths of modules, require=[path]",
    )


def check_requirement(report: Report, require: float | Sequence[str] | None) -> None:
    """Raise ``CoverageError`` when ``report`` has less quantized than ``require`` asks for.

    ``require`` is a share of the multiply-adds (0 to 1), or dotted module paths; ``None`` asks for
    any operator at all.

    >>> rows = (Row("fc", "Linear", "fc", "quantized"),)
    >>> check_requirement(Report("x86", rows=rows), 0.5)
    >>> check_requirement(Report("x86"), None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    backquant.errors.CoverageError: nothing in this model can be quantized for x86
      where  the model has no operators
      ...
    """
    if isinstance(require, Sequence):
        _check_modules(report, require)
    elif require is not None:
        _check_share(report, require)
    if not report.quantized:
        raise CoverageError(
            f"nothing in this model can be quantized for {report.backend}",
            where=_refusals(report.float_rows, report.multiply_adds)
            or "the model has no operators",
            fix=_fix(report.float_rows),
        )


def _check_share(report: Report, share: float) -> None:
    """A share that is not known is not enough, unless none is asked for."""
    if share == 0 or report.coverage >= share:
        return
    if math.isnan(report.coverage):
        raise _uncounted(report, share)
    refused = [*report.float_rows, *(row for row in report.operators if row.float_multiply_adds)]
    done = "run on integers" if report.lowered else "can be quantized"
    raise CoverageError(
        f"{percent(report.coverage)} of the multiply-adds {done} for {report.backend}, "
        f"and {share:.1%} is required",
        where=_refusals(refused, report.multiply_adds),
        fix=_fix(sorted(refused, key=lambda row: -row.multiply_adds)),
    )


def _uncounted(report: Report, share: float) -> CoverageError:
    if report.not_counted:
        where = report.not_counted
    else:
        rows = report.uncounted
        names = dict.fromkeys(name for row in rows for name in row.uncounted)
        where = f"{_some([f'{row.name} ({row.operator})' for row in rows])}: {', '.join(names)}"
    return CoverageError(
        f"the share of multiply-adds that is quantized for {report.backend} is not known, and "
        f"{share:.1%} is required",
        where=where,
        fix=f"require={[r.module_path for r in report.operators if r.quantized][:1]!r}   # by path",
    )


def _check_modules(report: Report, names: Sequence[str]) -> None:
    for name in names:
        rows = [row for row in report.operators if _inside(row, name)]
        if not rows:
            raise UsageError(
                f"no operator of the model is in a module {name!r}",
                where="require",
                fix=_nearest(name, report),
            )
        refused = [row for row in rows if not row.quantized or row.float_multiply_adds]
        if refused:
            raise CoverageError(
                f"{name!r} is required to be quantized, and stays float on {report.backend}",
                where=_refusals(refused, report.multiply_adds),
                fix=_fix(refused),
            )


def _nearest(name: str, report: Report) -> str:
    paths = {path for row in report.operators for path in (row.module_path, *row.fused) if path}
    parents = {path.rsplit(".", 1)[0] for path in paths}
    known = sorted(paths)[:12]
    shown = f"require={known[:1]!r}   # with operators: {', '.join(known)}"
    return did_you_mean(name, sorted(paths | parents), shown, most=3)


def _inside(row: Row, name: str) -> bool:
    """Whether the row is or holds an operator of the module: also one that was fused into it."""
    return any(
        path == name or path.startswith(name + ".") for path in (row.module_path, *row.fused)
    )


def _refusals(rows: Sequence[Row], total: int) -> str:
    """One line for each reason, the one with most multiply-adds first, with the operators it holds for."""
    by_reason: dict[str, list[Row]] = {}
    for row in rows:
        text = _reason(row.reasons[0]) if row.reasons else "no reason given"
        by_reason.setdefault(text, []).append(row)
    costs = {text: sum(row.multiply_adds for row in same) for text, same in by_reason.items()}
    lines = []
    for text in sorted(by_reason, key=lambda text: -costs[text]):
        share = f", {percent(costs[text] / total)} of the multiply-adds" if costs[text] else ""
        operators = [f"{row.module_path or row.node} ({row.operator})" for row in by_reason[text]]
        lines.append(f"{_some(operators)}{share}: {text}")
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more reasons"]
    return "\n         ".join(lines)


def _reason(reason: ReasonRow) -> str:
    parts = [reason.rule]
    parts += [f"requested {reason.asked}"] if reason.asked else []
    parts += [f"supported {reason.admitted}"] if reason.admitted else []
    return ", ".join(parts)


def _some(operators: list[str]) -> str:
    named = list(dict.fromkeys(operators))
    shown = collapsed(named) if len(named) > _NAMED else named
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    count = f" ({len(operators)} operators)" if len(shown) < len(named) else ""
    return ", ".join(shown[:_NAMED]) + more + count


def _fix(refused: Sequence[Row]) -> str:
    """The fix of the first refusal that has one; the report has all."""
    fixes = (reason.fix for row in refused for reason in row.reasons[:1] if reason.fix)
    everything = "print(backquant.explain(model, example_inputs, ...))   # has every reason"
    first = next(fixes, "")
    return f"{first}\n{everything}" if first else everything


# The one warning of the torch-compatible entry points: what stays float, and why.

_SHOWN_SKIPPED = 10


def warn_of_skipped(plan: Plan, *others: str) -> None:
    """One warning for all operators that a QConfig asked for and the backend refused, and ``others``.

    What the backend leaves in float by default stands in the report alone. The warning points at the line of
    the user that called the entry point.
    """
    lines = [*_skipped(plan), *others]
    if lines:
        warnings.warn("\n".join(lines), stacklevel=_level_of_caller())


def skipped_in_standalone(prepared: fx.GraphModule) -> list[str]:
    """The same of the standalone modules of ``prepared``, for ``others``.

    Raises ``UsageError`` when the model is not prepared.
    """
    lines: list[str] = []
    for prefix, part in prepared_parts(prepared):
        found = _skipped(prepared_state(part).plan) if prefix else []
        if found:
            lines += [f"in standalone module {prefix.rstrip('.')!r}: {found[0]}", *found[1:]]
    return lines


def _skipped(plan: Plan) -> list[str]:
    refused = [
        decision
        for decision in plan.decisions.values()
        if decision.rule is not None
        and decision.reasons
        and decision.match is not None
        and not decision.quantized
        and decision.asked_activation is not None
        and not left_by_default(plan, decision)
    ]
    lines = [str(decision) for decision in refused[:_SHOWN_SKIPPED]]
    if refused:
        lines.insert(0, f"{len(refused)} operators stay float on {plan.backend}:")
    if len(refused) > _SHOWN_SKIPPED:
        lines.append(f"… and {len(refused) - _SHOWN_SKIPPED} more")
    return lines


def _level_of_caller() -> int:
    """The ``stacklevel`` for which a warning of the function that asks points at the user's line."""
    level, frame = 1, inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("backquant."):
        level, frame = level + 1, frame.f_back
    return level
