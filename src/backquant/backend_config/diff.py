"""The difference of two backend descriptions, per operator and field.

Invariant: a diff is empty exactly when the two descriptions are equal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from backquant.backend_config.declared import Declared, Record, declared
from backquant.backend_config.defaults import DefaultOverride
from backquant.backend_config.describe import (
    describe_dtype_config,
    describe_entry,
    describe_pattern,
)
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig, TensorDType
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.kinds import Nested, OnePattern, Several
from backquant.backend_config.naming import operator_label
from backquant.backend_config.pattern import NormalPattern
from backquant.backend_config.pattern_config import BackendPatternConfig

Kind = Literal["added", "removed", "changed"]

_WIDTH = 100
_MARKS = {"added": "+", "removed": "-", "changed": "~"}


@dataclass(frozen=True)
class FieldChange:
    """One field; an empty ``before`` or ``after`` means that the field is not set there.

    >>> print(FieldChange("qat_module", "", "qat.Linear"))
    + qat_module: qat.Linear
    """

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        if not self.before:
            return f"+ {self.field}: {self.after}"
        if not self.after:
            return f"- {self.field}: {self.before}"
        return f"~ {self.field}: {self.before} ⇒ {self.after}"


@dataclass(frozen=True)
class EntryChange:
    """One pattern: in the second backend only, in the first only, or in both with changes."""

    pattern: str
    kind: Kind
    fields: tuple[FieldChange, ...]


@dataclass(frozen=True)
class BackendDiff:
    """What differs between two backends. False when nothing does.

    ``fields``: name, engine, defaults, qdq, slower, and ``order`` when entries of both stand in another order
    (which decides between patterns of one size). ``entries``: changed and removed entries in the order
    of the first backend, then added ones in the order of the second.
    """

    first: str
    second: str
    fields: tuple[FieldChange, ...]
    entries: tuple[EntryChange, ...]

    def __bool__(self) -> bool:
        return bool(self.fields or self.entries)

    def to_dict(self) -> dict[str, Any]:
        """The diff as JSON-able data: lists of ``{field, before, after}`` per backend and pattern.

        >>> diff(Description("a"), Description("b")).to_dict()["fields"]
        [{'field': 'name', 'before': 'a', 'after': 'b'}]
        """
        data = asdict(self)
        entries = [{**entry, "fields": list(entry["fields"])} for entry in data["entries"]]
        return {**data, "fields": list(data["fields"]), "entries": entries}

    def render(self) -> str:
        """Readable lines, without markup: patterns with the same changes are listed together.

        >>> print(diff(Description("a"), Description("b")).render())
        a ⇒ b: 0 entries added, 0 removed, 0 changed
        ~ name: a ⇒ b
        """
        if not self:
            return f"{self.first} and {self.second} are equal"
        counts = {kind: sum(e.kind == kind for e in self.entries) for kind in _MARKS}
        summary = f"{counts['added']} entries added, {counts['removed']} removed"
        lines = [f"{self.first} ⇒ {self.second}: {summary}, {counts['changed']} changed"]
        lines += _field_lines(self.fields)
        for (kind, changes), patterns in _grouped(self.entries).items():
            lines.append("")
            lines += _wrapped(patterns, _MARKS[kind])
            lines += [f"    {change}" for change in changes]
        return "\n".join(lines)


def diff(first: Description, second: Description) -> BackendDiff:
    """What changes from ``first`` to ``second``.

    >>> import torch
    >>> def backend(dtype):
    ...     entry = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(dtype, dtype))
    ...     return Description("mine").set_backend_pattern_config(entry)
    >>> print(diff(backend(torch.quint8), backend(torch.qint8)).render())
    mine ⇒ mine: 0 entries added, 0 removed, 1 changed
    <BLANKLINE>
    ~ torch.add
        - dtype_configs: quint8 → quint8
        + dtype_configs: qint8 → qint8
    """
    mine, theirs = first.shared_entries, second.shared_entries
    entries: list[EntryChange] = []
    for pattern, entry in mine.items():
        if pattern not in theirs:
            removed = tuple(_beside_pattern(entry, _UNSET))
            entries.append(EntryChange(describe_entry(entry), "removed", removed))
        elif changes := tuple(_entry_changes(entry, theirs[pattern])):
            entries.append(EntryChange(describe_entry(entry), "changed", changes))
    for pattern, entry in theirs.items():
        if pattern not in mine:
            added = tuple(_beside_pattern(_UNSET, entry))
            entries.append(EntryChange(describe_entry(entry), "added", added))
    fields = (*_changes(first, second), *_order_changes(mine, theirs))
    return BackendDiff(first.name, second.name, fields, tuple(entries))


def _wrapped(patterns: list[str], mark: str) -> list[str]:
    """Patterns with commas between, broken between patterns only."""
    glued = ", ".join(pattern.replace(" ", "\u00a0") for pattern in patterns)
    lines = textwrap.wrap(
        glued,
        width=_WIDTH,
        initial_indent=f"{mark} ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]


def _field_lines(changes: tuple[FieldChange, ...]) -> list[str]:
    """One line per change; operators whose defaults change alike share a line."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in changes:
        head, bracket, operator = change.field.partition("[")
        groups.setdefault((head + bracket, change.before, change.after), []).append(operator[:-1])
    return [
        str(FieldChange(f"{head}{', '.join(names)}]" if names[0] else head, before, after))
        for (head, before, after), names in groups.items()
    ]


def _grouped(
    entries: tuple[EntryChange, ...],
) -> dict[tuple[Kind, tuple[FieldChange, ...]], list[str]]:
    groups: dict[tuple[Kind, tuple[FieldChange, ...]], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.kind, entry.fields), []).append(entry.pattern)
    return groups


# -- records, field by field -------------------------------------------------------------------------


def _changes(before: Any, after: Any, at: str = "") -> Iterator[FieldChange]:
    """The declared fields in which two objects of one class differ, those of records within by their paths.

    An object that is absent (None) differs in all that is set, or in being there.
    """
    of_either = before if after is None else after
    for field in declared(type(of_either)):
        one, two = (_value(side, field) for side in (before, after))
        if one != two:
            yield from _field_changes(field, one, two, f"{at}.{field.name}" if at else field.name)


def _value(side: Any, field: Declared) -> Any:
    if side is None:
        return None if field.required else field.default
    return getattr(side, field.attribute)


def _field_changes(field: Declared, one: Any, two: Any, at: str) -> Iterator[FieldChange]:
    kind = field.kind
    if isinstance(kind, Several):
        yield from _list_changes(one, two, at)
    elif isinstance(kind, TensorDType) or (isinstance(kind, Nested) and not kind.has_words):
        inside = list(_changes(one, two, at))
        yield from inside or [FieldChange(at, *("" if v is None else "set" for v in (one, two)))]
    else:
        before, after = _text(field, one, kind.words), _text(field, two, kind.words)
        if before == after:  # numbers of which a sentence shows six digits
            before, after = _text(field, one, kind.source), _text(field, two, kind.source)
        yield FieldChange(at, before, after)


def _list_changes(one: Any, two: Any, at: str) -> Iterator[FieldChange]:
    """Records that stand in one list only; else the order of the lists."""
    before, after = (
        {
            _label(item, index): str(item) or "as the backend"
            for index, item in enumerate(items or ())
        }
        for items in (one, two)
    )
    changed = [label for label in {**before, **after} if before.get(label) != after.get(label)]
    for label in changed:
        yield FieldChange(f"{at}[{label}]", before.get(label, ""), after.get(label, ""))
    if not changed:
        yield FieldChange(f"{at} order", ", ".join(before), ", ".join(after))


def _label(record: Record, index: int) -> str:
    """What tells a record from its neighbours: the operators of an override, the place of a rule."""
    if not isinstance(record, DefaultOverride):
        return str(index)
    where = ", between float operators" if record.between_float_operators else ""
    return ", ".join(map(operator_label, record.operators)) + where


def _text(field: Declared, value: Any, words: Callable[[Any], str]) -> str:
    """A field's value in a few words; empty when it is not set."""
    return "" if value is None or value == field.kind.default else words(value)


def _order_changes(
    mine: Mapping[NormalPattern, BackendPatternConfig],
    theirs: Mapping[NormalPattern, BackendPatternConfig],
) -> Iterator[FieldChange]:
    before = [pattern for pattern in mine if pattern in theirs]
    after = [pattern for pattern in theirs if pattern in mine]
    moved = [index for index, pattern in enumerate(before) if pattern != after[index]]
    if moved:
        start = moved[0]
        yield FieldChange(
            "order",
            f"{describe_pattern(before[start])} at place {start} of those in both",
            f"{describe_pattern(after[start])} ({len(moved)} places differ)",
        )


def _entry_changes(
    before: BackendPatternConfig, after: BackendPatternConfig
) -> Iterator[FieldChange]:
    if before == after:
        return
    if _spelling(before) != _spelling(after):
        yield FieldChange("pattern", _spelling(before), _spelling(after))
    yield from _beside_pattern(before, after)


_UNSET = BackendPatternConfig()


def _beside_pattern(
    before: BackendPatternConfig, after: BackendPatternConfig
) -> Iterator[FieldChange]:
    yield from _dtype_changes(before.dtype_configs, after.dtype_configs)
    for field in declared(BackendPatternConfig):
        one, two = (getattr(entry, field.attribute) for entry in (before, after))
        if one != two and not isinstance(field.kind, (OnePattern, Several)):
            yield from _field_changes(field, one, two, field.name)


def _spelling(entry: BackendPatternConfig) -> str:
    if isinstance(entry.pattern, GraphPattern):
        return repr(entry.pattern)
    return "reversed form" if entry.pattern is None else "forward form"


def _dtype_changes(before: list[DTypeConfig], after: list[DTypeConfig]) -> Iterator[FieldChange]:
    """Configs of the same dtypes are compared field by field; the others are removed and added."""
    olds, news = list(before), list(after)
    for config in before:
        if config in news:
            olds.remove(config)
            news.remove(config)
    changed: list[FieldChange] = []
    for old in list(olds):
        partner = next((new for new in news if _tokens(new) == _tokens(old)), None)
        if partner is not None:
            bare = describe_dtype_config(DTypeConfig(*_tokens(old)))
            changed.extend(_changes(old, partner, f"dtype_configs[{bare}]"))
            olds.remove(old)
            news.remove(partner)
    yield from changed
    for config in olds:
        yield FieldChange("dtype_configs", describe_dtype_config(config), "")
    for config in news:
        yield FieldChange("dtype_configs", "", describe_dtype_config(config))
    if before != after and not (changed or olds or news):
        yield FieldChange("dtype_configs order", _list(before), _list(after))


def _list(configs: list[DTypeConfig]) -> str:
    return "; ".join(map(describe_dtype_config, configs))


def _tokens(config: DTypeConfig) -> tuple[Any, ...]:
    roles = (config.input_dtype, config.output_dtype, config.weight_dtype)
    return (*roles, config.bias_dtype, config.is_dynamic)
