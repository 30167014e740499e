"""Support tables of a backend, made from its description.

A row is a run of entries that differ in their operators only. Columns:

* ``operators``: patterns in the order in which they are registered;
* ``modes``: static, dynamic, weight-only, float (see ``describe.mode_of``);
* ``dtypes``: what is admitted, first choice first; rendered as letters that a legend explains;
* ``per_channel``: whether the weight may have one scale per channel;
* ``fused_as``, ``qat``, ``reference``: the modules that it becomes;
* ``observation``: where observers stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.declared import phrases, set_fields
from backquant.backend_config.defaults import BackendDefaults, DefaultOverride
from backquant.backend_config.describe import describe_dtype_config, describe_entry, mode_of
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_label
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.dtypes import Granularity
from backquant.pages import Document, Listing, Section, Table, letters_of

_OBSERVATIONS = {
    ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT: "own",
    ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT: "shared",
    ObservationType.INPUT_OUTPUT_NOT_OBSERVED: "none",
}


@dataclass(frozen=True)
class SupportRow:
    """One row; every cell is a tuple of lines, empty where nothing applies."""

    operators: tuple[str, ...]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    per_channel: tuple[str, ...]
    fused_as: tuple[str, ...]
    qat: tuple[str, ...]
    reference: tuple[str, ...]
    observation: tuple[str, ...]

    def to_dict(self) -> dict[str, list[str]]:
        """The row as JSON-able data, by the names of its fields.

        >>> row = SupportRow(("torch.add",), ("static",), (), (), (), (), (), ("own",))
        >>> row.to_dict()["operators"]
        ['torch.add']
        """
        return {name: list(lines) for name, lines in vars(self).items()}


def support_rows(config: BackendConfig) -> list[SupportRow]:
    """The rows of the support table, in the order of the entries.

    >>> import torch
    >>> from backquant.backend_config import BackendPatternConfig, DTypeConfig
    >>> int8 = DTypeConfig(torch.quint8, torch.quint8)
    >>> entries = [BackendPatternConfig(op).add_dtype_config(int8) for op in (torch.add, torch.mul)]
    >>> [row] = support_rows(BackendConfig("mine").set_backend_pattern_configs(entries))
    >>> row.operators, row.dtypes
    (('torch.add', 'torch.mul'), ('static: quint8 → quint8',))
    """
    rows: list[SupportRow] = []
    for entry in config.shared_configs:
        row = _row(entry)
        if rows and replace(rows[-1], operators=()) == replace(row, operators=()):
            rows[-1] = replace(row, operators=rows[-1].operators + row.operators)
        else:
            rows.append(row)
    return rows


def document_of(config: BackendConfig) -> Document:
    """The support table of a backend, with what it does by default.

    >>> document_of(BackendConfig("mine")).headline
    'mine: 0 patterns'
    """
    rows = support_rows(config)
    letters = letters_of(text for row in rows for text in row.dtypes)
    heads = "operators, quantization, dtypes, per channel, becomes, output qparams"
    engine = f", engine {config.engine}" if config.engine else ""
    return Document(
        title=config.name,
        headline=f"{config.name}: {len(config.shared_configs)} patterns{engine}",
        parts=[
            Section("", [Listing("", [f"{letter}  {text}" for text, letter in letters.items()])]),
            Table.of(heads, [["\n".join(cell) for cell in _cells(row, letters)] for row in rows]),
            Section("Defaults", [Listing("", default_lines(config))]),
            Section("Quantize and dequantize nodes", [Listing("", qdq_lines(config))]),
            Section("Known to be slower on integers", [Listing("", slower_lines(config))]),
        ],
    )


def _cells(row: SupportRow, letters: dict[str, str]) -> Iterator[Iterable[str]]:
    modules = (("fused", row.fused_as), ("QAT", row.qat), ("ref.", row.reference))
    yield row.operators
    yield row.modes
    yield (" ".join(letters[text] for text in row.dtypes),)
    yield row.per_channel
    yield (f"{label} {name}" for label, names in modules for name in names)
    yield row.observation


def _row(entry: BackendPatternConfig) -> SupportRow:
    configs = entry.dtype_configs
    return SupportRow(
        operators=(describe_entry(entry),),
        modes=tuple(dict.fromkeys(map(mode_of, configs))),
        dtypes=tuple(_dtypes(config, entry) for config in configs),
        per_channel=_per_channel(entry),
        fused_as=_name(entry.fused_module),
        qat=_name(entry.qat_module),
        reference=_name(entry.reference_quantized_module),
        observation=_observation(entry),
    )


def _dtypes(config: DTypeConfig, entry: BackendPatternConfig) -> str:
    where = "" if entry.where is None else f", where {entry.where}"
    return f"{mode_of(config)}: {describe_dtype_config(config)}{where}"


def _name(module: Any) -> tuple[str, ...]:
    return () if module is None else (operator_label(module),)


_CHANNELS = {None: "yes", "per_tensor": "no", "per_channel": "only"}


def _per_channel(entry: BackendPatternConfig) -> tuple[str, ...]:
    """What the weight constraints say; unconstrained weights may be quantized per channel."""
    words: dict[str, None] = {}
    for config in entry.dtype_configs:
        weight = config.weight_dtype_with_constraints
        if weight.dtype is None or (weight.dtype.is_floating_point and weight.dtype.itemsize > 1):
            continue
        word = _CHANNELS.get(weight.granularity) or Granularity.parse(str(weight.granularity)).words
        axis = "" if weight.ch_axis is None else f", axis {weight.ch_axis}"
        words[word + axis] = None
    return tuple(words)


def _observation(entry: BackendPatternConfig) -> tuple[str, ...]:
    counts = entry._num_tensor_args_to_observation_type
    if not counts:
        return (_OBSERVATIONS[entry.observation_type],)
    return tuple(
        f"{count} tensor{'' if count == 1 else 's'}: {_OBSERVATIONS[kind]}"
        for count, kind in sorted(counts.items())
    )


def default_lines(config: BackendConfig) -> list[str]:
    """What the backend observes and quantizes with by default; one line per role and override."""
    defaults = config.defaults
    if defaults is None:
        return []
    lines = _roles(defaults)
    for override in defaults.overrides:
        names = ", ".join(map(operator_label, override.operators))
        where = " between float operators" if override.between_float_operators else ""
        lines.append(f"{names}{where} – {'; '.join(_roles(override)) or 'nothing of their own'}")
    return lines + list(map(_left_float, defaults.leave_float))


def _roles(record: BackendDefaults | DefaultOverride) -> list[str]:
    return [f"{role.replace('qat_', 'training, ')}: {v}" for role, v in record.roles().items()]


def _left_float(rule: LeaveFloat) -> str:
    operators = ", ".join(map(operator_label, rule.operators))
    return f"{operators} – float {', '.join(phrases(rule))}"


def qdq_lines(config: BackendConfig) -> list[str]:
    """The backend's rules for quantize and dequantize nodes that are not the default; one line each.

    >>> from backquant.backend_config import QDQRules
    >>> qdq_lines(BackendConfig("mine").set_qdq(QDQRules(quantize_constants=False)))
    ['quantize_constants: False']
    """
    if config.qdq is None:
        return []
    lines = [
        f"{field.name}: {value if isinstance(value, str) else field.kind.words(value)}"
        for field, value in set_fields(config.qdq)
        if field.name != "leave_float"
    ]
    return lines + [f"leave_float: {_left_float(rule)}" for rule in config.qdq.leave_float]


def slower_lines(config: BackendConfig) -> list[str]:
    """What the backend knows to be slower on integers, one line each.

    >>> from backquant.backend_config import KnownSlower
    >>> small = KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "20 steps", 20.0, 18.0)
    >>> slower_lines(BackendConfig("mine").set_slower([small]))
    ['lstm where hidden_size ≤ 63 – 20 steps: 20 µs on integers, 18 in float']
    """
    return [
        f"{', '.join(record.operators)} where {record.condition} – {record.measured}: "
        f"{record.integer_us:g} µs on integers, {record.float_us:g} in float"
        for record in config.slower
    ]
