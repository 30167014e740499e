"""What the forms of the report count and put together: refusals, dtype configs, kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from backquant.reason_codes import ReasonCode
from backquant.report.model import ReasonRow, Report, Row
from backquant.report.paths import collapsed, listed

_RULES = 2  # rules named beside one reason
_READ = "\0"  # stands for the value that an operator reads, in the reasons of operators that read others
_MOST = 3  # values named in one reason


@dataclass(frozen=True)
class Refusal:
    """Operators that stay float for one reason; ``reasons`` are those of the first.

    Reasons that differ in the value that the operator reads are one; ``forms`` are the reasons without the
    names of such values, ``read`` the names.
    """

    operator: str
    rule: str
    names: tuple[str, ...]
    nodes: tuple[str, ...]
    reasons: tuple[ReasonRow, ...]
    multiply_adds: int = 0
    uncounted: bool = False
    forms: tuple[ReasonRow, ...] = ()
    read: tuple[str, ...] = ()

    @property
    def nearest(self) -> tuple[ReasonRow, ...]:
        """The reasons against the dtype config that is nearest to what was asked."""
        first = self.reasons[0].place if self.reasons else ""
        return tuple(reason for reason in self.reasons if reason.place == first)

    @property
    def nearest_forms(self) -> tuple[ReasonRow, ...]:
        """Those of ``nearest``."""
        first = self.reasons[0].place if self.reasons else ""
        return tuple(form for form in self.forms or self.reasons if form.place == first)

    @property
    def label(self) -> str:
        """The names, those of one form as one, and how many operators there are."""
        return listed(self.names, len(self.nodes))


def refusals(rows: Iterable[Row]) -> list[Refusal]:
    """Rows that stay float, those with the same operator and reasons together, in order.

    Rules that say ``None`` for one operator each are one reason.

    >>> why = ReasonRow("no-entry", "Softplus", "x86 has none")
    >>> [group] = refusals([Row(n, "Softplus", n, "float", reasons=(why,)) for n in "ab"])
    >>> group.names
    ('a', 'b')
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.operator, _rule_key(row), _forms(row)), []).append(row)
    return [_refusal(same) for same in groups.values()]


def _forms(row: Row) -> tuple[ReasonRow, ...]:
    """Its reasons, without what differs between operators that are refused alike."""
    read = _names_of(row)
    reasons = (replace(_general(row, reason), fix="", node="") for reason in row.reasons)
    return tuple(replace(r, admitted=read.sub(_READ, r.admitted)) for r in reasons)


def _names_of(row: Row) -> re.Pattern[str]:
    """The names of the values that the row reads, alone: ``add`` is not that of ``operator.add``."""
    names = "|".join(map(re.escape, sorted(set(row.inputs), key=len, reverse=True)))
    return re.compile(rf"(?<![\w.])(?:{names})(?![\w.(])" if names else r"(?!)")


def _read_by(rows: Iterable[Row]) -> tuple[str, ...]:
    """The values that are named in the reasons of ``rows``."""
    found = (_names_of(row).findall(reason.admitted) for row in rows for reason in row.reasons)
    return tuple(dict.fromkeys(name for names in found for name in names))


def merge_reasons(forms: Iterable[ReasonRow], read: Sequence[str]) -> tuple[ReasonRow, ...]:
    r"""The reasons with the values that the operators read, those of one form as one.

    >>> [reason] = merge_reasons([ReasonRow("rule", "", "it reads \0")], ["add_1", "add_2", "cat"])
    >>> reason.admitted
    'it reads add_* or cat'
    """
    patterns = collapsed(read)
    shown = patterns[:_MOST]
    if len(patterns) > _MOST:
        shown.append(f"one of {len(patterns) - _MOST} more")
    names = " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
    return tuple(replace(form, admitted=form.admitted.replace(_READ, names)) for form in forms)


def by_cost(groups: Iterable[Refusal]) -> list[Refusal]:
    """Those that multiply or that nobody has counted, the most expensive first.

    >>> cheap, dear, free = (Refusal("op", "", (), (), (), count) for count in (1, 2, 0))
    >>> by_cost([cheap, dear, free]) == [dear, cheap]
    True
    """
    costly = [group for group in groups if group.multiply_adds or group.uncounted]
    return sorted(costly, key=lambda group: (not group.uncounted, -group.multiply_adds))


def _refusal(same: list[Row]) -> Refusal:
    first = same[0]
    rule = ", ".join(collapsed(row.rule for row in same)[:_RULES])
    forms, read = _forms(first), _read_by(same)
    reasons = first.reasons
    if len(same) > 1:
        general = merge_reasons(forms, read)
        reasons = tuple(
            replace(reason, asked=f"{rule} is None: skip")
            if _is_skip(first, reason)
            else replace(reason, admitted=form.admitted)
            for reason, form in zip(reasons, general, strict=True)
        )
    return Refusal(
        operator=first.operator,
        rule=rule,
        names=tuple(dict.fromkeys(row.name for row in same)),
        nodes=tuple(row.node for row in same),
        reasons=reasons,
        multiply_adds=sum(row.multiply_adds for row in same),
        uncounted=any(row.uncounted for row in same),
        forms=forms,
        read=read,
    )


def _is_skip(row: Row, reason: ReasonRow) -> bool:
    """Whether a rule of the mapping says ``None``; where no rule applies, the row has none."""
    return reason.rule == ReasonCode.QCONFIG_NONE and bool(row.rule)


def _general(row: Row, reason: ReasonRow) -> ReasonRow:
    return replace(reason, asked="") if _is_skip(row, reason) else reason


def _rule_key(row: Row) -> str:
    skips = bool(row.reasons) and all(_is_skip(row, reason) for reason in row.reasons)
    return row.rule.partition(" ")[0] if skips else row.rule


def dtype_letters(report: Report) -> dict[str, str]:
    """A letter for each dtype config that was chosen, in order of first use.

    >>> dtype_letters(Report("x86", rows=(Row("a", "add", "", "quantized", dtype_config="int8"),)))
    {'int8': 'A'}
    """
    chosen = dict.fromkeys(row.dtype_config for row in report.quantized if row.dtype_config)
    return {text: _letter(index) for index, text in enumerate(chosen)}


def _letter(index: int) -> str:
    turn, position = divmod(index, 26)
    return chr(ord("A") + position) + (str(turn + 1) if turn else "")


def rules_differ(report: Report) -> bool:
    """Whether anything was asked of modules by name, beyond rules for all or for types.

    Those for one operator of a module (its n-th addition) are what a backend leaves in float by default.

    >>> [
    ...     rules_differ(Report("x86", rows=(Row("a", "add", "", "quantized", rule=rule),)))
    ...     for rule in ("global", "module_name 'a'")
    ... ]
    [False, True]
    """
    return any(row.rule.startswith(("module_name ", "module_name_regex ")) for row in report.rows)


def kernel_counts(report: Report) -> dict[str, int]:
    """How often each kernel runs, the most frequent first; one that took in several operators once."""
    return dict(Counter(report.kernels).most_common())
