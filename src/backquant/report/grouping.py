"""What the forms of the report count and put together: refusals, dtype configs, kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from backquant.report.model import ReasonRow, Report, Row

__all__ = ["Refusal", "dtype_letters", "kernel_counts", "refusals", "rules_differ"]


@dataclass(frozen=True)
class Refusal:
    """Operators that stay float for one reason; ``reasons`` are those of the first."""

    operator: str
    rule: str
    names: tuple[str, ...]
    nodes: tuple[str, ...]
    reasons: tuple[ReasonRow, ...]

    @property
    def nearest(self) -> tuple[ReasonRow, ...]:
        """The reasons against the dtype config that is nearest to what was asked."""
        first = self.reasons[0].place if self.reasons else ""
        return tuple(reason for reason in self.reasons if reason.place == first)


def refusals(rows: Iterable[Row]) -> list[Refusal]:
    """Rows that stay float, those with the same operator and reasons together, in order.

    >>> why = ReasonRow("no-entry", "Softplus", "x86 has none")
    >>> [group] = refusals([Row(n, "Softplus", n, "float", reasons=(why,)) for n in "ab"])
    >>> group.names
    ('a', 'b')
    """
    groups: dict[object, list[Row]] = {}
    for row in rows:
        plain = tuple(replace(reason, fix="", node="") for reason in row.reasons)
        groups.setdefault((row.operator, row.rule, plain), []).append(row)
    return [
        Refusal(
            operator=same[0].operator,
            rule=same[0].rule,
            names=tuple(dict.fromkeys(row.name for row in same)),
            nodes=tuple(row.node for row in same),
            reasons=same[0].reasons,
        )
        for same in groups.values()
    ]


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

    >>> rules_differ(Report("x86", rows=(Row("a", "add", "", "quantized", rule="global"),)))
    False
    """
    return any(row.rule.startswith("module_name") for row in report.rows)


def kernel_counts(report: Report) -> dict[str, int]:
    """How often each kernel runs, the most frequent first; one that took in several operators once."""
    return dict(Counter(report.kernels).most_common())
