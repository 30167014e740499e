"""What stays float: refusals, and what is said of them.

A ``Refusal`` has operators that stay float for one reason. A ``Paragraph`` has one rule and one fix, over all
that it holds for. Operators that were refused alike in it are a ``Part``: those that read
other float values, or those of a group that is slower on integers than in float, of whatever kind. Groups of
the same kinds of operators whose times differ are one part, with the least and the greatest time; each
operator's own are in its row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from backquant.reason_codes import ReasonCode
from backquant.report.rows import ReasonRow, Row

_TIME = re.compile(r"(\d+(?:\.\d+)?) µs")
_RULES = 2  # rules of the QConfigMapping that are named beside one reason
_READ = "\0"  # stands for the value that an operator reads, in the reasons of operators that read others
_MOST = 3  # names in one text


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


@dataclass(frozen=True)
class Part:
    """Refusals with the same reasons: ``asked`` and ``admitted`` are those of each reason."""

    refusals: tuple[Refusal, ...]
    reasons: tuple[ReasonRow, ...]

    @property
    def count(self) -> int:
        """How many operators."""
        return sum(len(refusal.nodes) for refusal in self.refusals)


@dataclass(frozen=True)
class Paragraph:
    """Parts with the same rules, fixes and places."""

    parts: tuple[Part, ...]

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Those of all parts."""
        return tuple(refusal for part in self.parts for refusal in part.refusals)

    @property
    def count(self) -> int:
        """How many operators."""
        return sum(part.count for part in self.parts)

    @property
    def reasons(self) -> tuple[ReasonRow, ...]:
        """Those of the first part, without what differs from part to part."""
        first = self.parts[0].reasons
        return tuple(
            replace(
                reason,
                asked=reason.asked if self._alike(i, "asked") else "",
                admitted=reason.admitted if self._alike(i, "admitted") else "",
            )
            for i, reason in enumerate(first)
        )

    @property
    def rule(self) -> str:
        """The rules of the mapping that applied."""
        return ", ".join(collapsed(r.rule for r in self.refusals if r.rule)[:_RULES])

    @property
    def title(self) -> str:
        """Which operators, or how many of how many kinds."""
        [*several] = self.refusals
        if len(several) == 1:
            return f"{several[0].label}  {several[0].operator}"
        free = not any(refusal.multiply_adds or refusal.uncounted for refusal in several)
        return f"{self.count} operators" + (" without multiply-adds" if free else "")

    @property
    def has_no_entry(self) -> bool:
        """Whether it is about operators of several kinds that the backend has no entry for."""
        rules = {reason.rule for reason in self.parts[0].reasons}
        return len(self.parts) > 1 and rules == {ReasonCode.NO_ENTRY}

    def differing(self, part: Part) -> str:
        """What of the reasons of ``part`` does not hold for all parts, but their names."""
        if self.has_no_entry:
            return ""
        texts = [
            getattr(reason, field)
            for i, reason in enumerate(part.reasons)
            for field in ("asked", "admitted")
            if not self._alike(i, field)
        ]
        return "; ".join(text for text in texts if text)

    def _alike(self, position: int, field: str) -> bool:
        return (
            not self.has_no_entry
            and len({getattr(part.reasons[position], field) for part in self.parts}) == 1
        )


def paragraphs(groups: Iterable[Refusal]) -> list[Paragraph]:
    """Those about the most expensive operators first, the others in the order of the graph.

    >>> no_entry = ReasonRow("no-entry", "add", "x86 has no entry")
    >>> kinds = [Refusal(kind, "", (kind,), (kind,), (no_entry,), 0) for kind in ("add", "mul")]
    >>> [(one.title, len(one.parts)) for one in paragraphs(kinds)]
    [('2 operators without multiply-adds', 1)]
    """
    groups = list(groups)
    costly = by_cost(groups)
    known = {id(group) for group in costly}
    same: dict[object, list[Refusal]] = {}
    for group in [*costly, *(group for group in groups if id(group) not in known)]:
        same.setdefault(_topic(group), []).append(group)
    return [_paragraph(alike) for alike in same.values()]


def _topic(group: Refusal) -> object:
    """What refusals of one paragraph share. An operator that multiplies and has no entry has its own."""
    if not group.reasons:
        return ("no reason", group.operator, group.rule)
    rules = tuple((reason.rule, reason.fix, reason.place) for reason in group.nearest)
    costs = bool(group.multiply_adds or group.uncounted)
    slower = all(reason.rule == ReasonCode.SLOWER_THAN_FLOAT for reason in group.nearest)
    return (rules, group.operator if costs and not slower else "")


def _paragraph(groups: list[Refusal]) -> Paragraph:
    same: dict[object, list[Refusal]] = {}
    for group in groups:
        said = tuple((form.asked, form.admitted) for form in group.nearest_forms)
        same.setdefault(said, []).append(group)
    alike: dict[object, list[Part]] = {}
    for part in map(_part, same.values()):
        alike.setdefault(_kinds(part), []).append(part)
    return Paragraph(tuple(map(_merged, alike.values())))


def _part(groups: list[Refusal]) -> Part:
    first = groups[0]
    if len(groups) == 1:
        return Part((first,), first.nearest)
    read = tuple(dict.fromkeys(name for group in groups for name in group.read))
    general = zip(first.nearest, merge_reasons(first.nearest_forms, read), strict=True)
    return Part(
        tuple(groups), tuple(replace(said, admitted=form.admitted) for said, form in general)
    )


def _kinds(part: Part) -> object:
    """What parts have in common whose reasons differ in measured times only."""
    texts = tuple((_TIME.sub("", r.asked), _TIME.sub("", r.admitted)) for r in part.reasons)
    measured = any(_TIME.search(reason.admitted) for reason in part.reasons)
    kinds = frozenset(refusal.operator for refusal in part.refusals)
    return (texts, kinds) if measured else (id(part),)


def _merged(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    kinds: dict[str, list[Refusal]] = {}
    for part in parts:
        for refusal in part.refusals:
            kinds.setdefault(refusal.operator, []).append(refusal)
    reasons = zip(*(part.reasons for part in parts), strict=True)
    return Part(tuple(map(_together, kinds.values())), tuple(map(_ranged, reasons)))


def _together(refusals: list[Refusal]) -> Refusal:
    return replace(
        refusals[0],
        names=tuple(dict.fromkeys(name for refusal in refusals for name in refusal.names)),
        nodes=tuple(node for refusal in refusals for node in refusal.nodes),
        rule=", ".join(dict.fromkeys(refusal.rule for refusal in refusals if refusal.rule)),
        multiply_adds=sum(refusal.multiply_adds for refusal in refusals),
        uncounted=any(refusal.uncounted for refusal in refusals),
    )


def _ranged(reasons: tuple[ReasonRow, ...]) -> ReasonRow:
    return replace(
        reasons[0],
        asked=_ranges([reason.asked for reason in reasons]),
        admitted=_ranges([reason.admitted for reason in reasons]),
    )


def _ranges(texts: list[str]) -> str:
    """Texts that differ in times, as one.

    >>> _ranges(["9.1 µs in all", "12 µs in all", "10.5 µs in all"]), _ranges(["2 µs", "2 µs"])
    ('9.1 to 12 µs in all', '2 µs')
    """
    columns = zip(*(_TIME.findall(text) for text in texts), strict=True)
    ends = iter([(min(times, key=float), max(times, key=float)) for times in columns])

    def fill(_: re.Match[str]) -> str:
        low, high = next(ends)
        return f"{low} µs" if low == high else f"{low} to {high} µs"

    return _TIME.sub(fill, texts[0])


_NUMBER = re.compile(r"(\d+)")


def collapsed(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers only as one pattern, with ``*`` for the numbers that differ.

    >>> collapsed(["layers.0.ln_1", "layers.1.ln_1", "ln", "layers.2.ln_1"])
    ['layers.*.ln_1', 'ln']
    """
    forms: dict[tuple[str, ...], list[list[str]]] = {}
    for name in dict.fromkeys(names):
        parts = _NUMBER.split(name)
        forms.setdefault(tuple(parts[::2]), []).append(parts)
    return [_pattern(same) for same in forms.values()]


def _pattern(names: Sequence[list[str]]) -> str:
    first = names[0]
    varies = [len({parts[i] for parts in names}) > 1 for i in range(len(first))]
    return "".join("*" if varied else part for part, varied in zip(first, varies, strict=True))


def listed(names: Sequence[str], count: int) -> str:
    """A few names as they are; more as patterns, three of them, with the number of operators.

    >>> listed(["a.1", "a.2"], 2), listed(["a.1", "a.2", "b"], 4), listed(list("abcde"), 5)
    ('a.1, a.2', 'a.*, b (4 operators)', 'a, b, c and 2 more (5 operators)')
    """
    if len(names) == count <= _MOST:
        return ", ".join(names)
    patterns = collapsed(names)
    text = ", ".join(patterns[:_MOST])
    if len(patterns) > _MOST:
        text += f" and {len(patterns) - _MOST} more"
    return text if count == 1 else f"{text} ({count} operators)"
