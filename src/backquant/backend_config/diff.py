"""The difference of two backend descriptions, per operator and field.

Invariant: a diff is empty exactly when the two descriptions are equal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from backquant.backend_config.conditions import AllOf, AnyOf, Comparison, NotSo
from backquant.backend_config.config import BackendConfig
from backquant.backend_config.defaults import DEFAULT_ROLES, BackendDefaults
from backquant.backend_config.describe import (
    describe_default,
    describe_dtype_config,
    describe_entry,
    describe_pattern,
    operator_label,
)
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.known_slower import KnownSlower
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_name
from backquant.backend_config.numbers import number_text
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern import NormalPattern, normal_form
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.ports import NamedNode, NamedNodes, Port
from backquant.backend_config.qdq import QDQRules

Kind = Literal["added", "removed", "changed"]

_WIDTH = 100
_MARKS = {"added": "+", "removed": "-", "changed": "~"}
_ROLES = ("input_dtype", "output_dtype", "weight_dtype")
_FIELDS = {
    "observation_type": "observation_type",
    "root_module": "root_module",
    "qat_module": "qat_module",
    "reference_quantized_module": "reference_quantized_module",
    "fused_module": "fused_module",
    "fuser_method": "fuser_method",
    "root_node_getter": "_root_node_getter",
    "extra_inputs_getter": "_extra_inputs_getter",
    "num_tensor_args_to_observation_type": "_num_tensor_args_to_observation_type",
    "input_type_to_index": "_input_type_to_index",
    "ports": "ports",
    "where": "where",
    "input_output_observed": "_input_output_observed",
    "overwrite_output_fake_quantize": "_overwrite_output_fake_quantize",
    "overwrite_output_observer": "_overwrite_output_observer",
}


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

        >>> diff(BackendConfig("a"), BackendConfig("b")).to_dict()["fields"]
        [{'field': 'name', 'before': 'a', 'after': 'b'}]
        """
        return {
            "first": self.first,
            "second": self.second,
            "fields": [_field_dict(change) for change in self.fields],
            "entries": [
                {
                    "pattern": change.pattern,
                    "kind": change.kind,
                    "fields": [_field_dict(field) for field in change.fields],
                }
                for change in self.entries
            ],
        }

    def render(self) -> str:
        """Readable lines, without markup: patterns with the same changes are listed together.

        >>> print(diff(BackendConfig("a"), BackendConfig("b")).render())
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


def diff(first: BackendConfig, second: BackendConfig) -> BackendDiff:
    """What changes from ``first`` to ``second``.

    >>> import torch
    >>> def backend(dtype):
    ...     entry = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(dtype, dtype))
    ...     return BackendConfig("mine").set_backend_pattern_config(entry)
    >>> print(diff(backend(torch.quint8), backend(torch.qint8)).render())
    mine ⇒ mine: 0 entries added, 0 removed, 1 changed
    <BLANKLINE>
    ~ torch.add
        - dtype_configs: quint8 → quint8
        + dtype_configs: qint8 → qint8
    """
    mine, theirs = first.entries, second.entries
    entries: list[EntryChange] = []
    for pattern, entry in mine.items():
        if pattern not in theirs:
            entries.append(EntryChange(describe_entry(entry), "removed", _all_fields(entry, -1)))
        elif changes := tuple(_entry_changes(entry, theirs[pattern])):
            entries.append(EntryChange(describe_entry(entry), "changed", changes))
    for pattern, entry in theirs.items():
        if pattern not in mine:
            entries.append(EntryChange(describe_entry(entry), "added", _all_fields(entry, 1)))
    fields = (*_head_changes(first, second), *_order_changes(mine, theirs))
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


def _field_dict(change: FieldChange) -> dict[str, str]:
    return {"field": change.field, "before": change.before, "after": change.after}


def _grouped(
    entries: tuple[EntryChange, ...],
) -> dict[tuple[Kind, tuple[FieldChange, ...]], list[str]]:
    groups: dict[tuple[Kind, tuple[FieldChange, ...]], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.kind, entry.fields), []).append(entry.pattern)
    return groups


def _head_changes(first: BackendConfig, second: BackendConfig) -> Iterator[FieldChange]:
    if first.name != second.name:
        yield FieldChange("name", first.name or '""', second.name or '""')
    if first.engine != second.engine:
        yield FieldChange("engine", _engine(first), _engine(second))
    if first.defaults != second.defaults:
        yield from _default_changes(first.defaults, second.defaults)
    if first.qdq != second.qdq:
        yield from _qdq_changes(first.qdq, second.qdq)
    if first.slower != second.slower:
        yield FieldChange("slower", _rule(first.slower), _rule(second.slower))


def _default_changes(
    first: BackendDefaults | None, second: BackendDefaults | None
) -> Iterator[FieldChange]:
    before, after = _defaults(first), _defaults(second)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in changed:
        yield FieldChange(f"defaults.{name}", before.get(name, ""), after.get(name, ""))
    if not changed:
        yield FieldChange("defaults.overrides order", ", ".join(before), ", ".join(after))


def _qdq_changes(first: QDQRules | None, second: QDQRules | None) -> Iterator[FieldChange]:
    before, after = first or QDQRules(), second or QDQRules()
    if before == after:
        yield FieldChange("qdq", "" if first is None else "set", "" if second is None else "set")
    for field in fields(QDQRules):
        one, two = getattr(before, field.name), getattr(after, field.name)
        if one != two:
            yield FieldChange(f"qdq.{field.name}", _rule(one), _rule(two))


def _rule(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    records = (LeaveFloat, KnownSlower)
    return ", ".join(repr(r) if isinstance(r, records) else operator_name(r) for r in value)


def _engine(config: BackendConfig) -> str:
    return "" if config.engine is None else config.engine or '""'


def _defaults(defaults: BackendDefaults | None) -> dict[str, str]:
    """Field → text, for every role and for every overridden operator."""
    if defaults is None:
        return {}
    texts: dict[str, str] = {}
    for role in DEFAULT_ROLES:
        value = getattr(defaults, role)
        if value is not None:
            texts[role] = describe_default(value)
    for override in defaults.overrides:
        words = [
            f"{role} {describe_default(value)}"
            for role in DEFAULT_ROLES
            if (value := getattr(override, role)) is not None
        ]
        for operator in override.operators:
            label = describe_pattern(normal_form(operator))
            where = ", between float operators" if override.between_float_operators else ""
            texts[f"overrides[{label}{where}]"] = "; ".join(words) or "as the backend"
    texts |= {f"leave_float[{i}]": repr(rule) for i, rule in enumerate(defaults.leave_float)}
    return texts


def _order_changes(
    mine: dict[NormalPattern, BackendPatternConfig],
    theirs: dict[NormalPattern, BackendPatternConfig],
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
    yield from _dtype_changes(before.dtype_configs, after.dtype_configs)
    for field, attribute in _FIELDS.items():
        old, new = getattr(before, attribute), getattr(after, attribute)
        if old != new:
            yield FieldChange(field, _text(old), _text(new))


def _spelling(entry: BackendPatternConfig) -> str:
    if isinstance(entry.pattern, GraphPattern):
        return repr(entry.pattern)
    return "reversed form" if entry.pattern is None else "forward form"


def _all_fields(entry: BackendPatternConfig, sign: int) -> tuple[FieldChange, ...]:
    """Every field that is set, as removed (``sign`` -1) or added (1)."""
    texts = [("dtype_configs", describe_dtype_config(config)) for config in entry.dtype_configs]
    texts += [
        (field, text)
        for field, attribute in _FIELDS.items()
        if (text := _text(getattr(entry, attribute)))
    ]
    return tuple(
        FieldChange(field, text, "") if sign < 0 else FieldChange(field, "", text)
        for field, text in texts
    )


def _text(value: Any) -> str:
    """A field's value in a few words; empty when it is not set."""
    if value is None or value == {}:
        return ""
    if isinstance(value, ObservationType):
        return value.name
    if isinstance(value, (Port, NamedNode, NamedNodes, AllOf, AnyOf, Comparison, NotSo)):
        return str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(item) or item}" for key, item in value.items())
    if isinstance(value, (bool, int)):
        return str(value)
    is_named = isinstance(value, type) or hasattr(value, "__qualname__")
    return operator_label(value) if is_named else repr(value)


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
            changed.extend(_constraint_changes(old, partner))
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
    return (*(getattr(config, role) for role in _ROLES), config.bias_dtype, config.is_dynamic)


def _constraint_changes(before: DTypeConfig, after: DTypeConfig) -> Iterator[FieldChange]:
    bare = DTypeConfig(*_tokens(before))
    head = f"dtype_configs[{describe_dtype_config(bare)}]"
    for role in _ROLES:
        old, new = (getattr(config, f"{role}_with_constraints") for config in (before, after))
        for field in fields(old):
            left, right = getattr(old, field.name), getattr(new, field.name)
            if left != right:
                yield FieldChange(f"{head}.{role}.{field.name}", _value(left), _value(right))
    results = ("bias_scale", "rounding", "requantization", "requantization_ratio")
    own = (*results, "bias_step_upper_bound", "table_entries", "tolerance", "where")
    for name in own:
        one, two = (str(getattr(config, name) or "") for config in (before, after))
        if one != two:
            yield FieldChange(f"{head}.{name}", one, two)


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(_value(one) or 'null' for one in value)}]"
    return number_text(value) if isinstance(value, (int, float)) else str(value)
