"""Mappings derived from a description, with the keys and the order of PyTorch's.

Keys are patterns as reversed nested tuples, or ``GraphPattern``s. Values are those of the entries, not
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.declared import phrases, set_fields
from backquant.backend_config.defaults import BackendDefaults, DefaultOverride
from backquant.backend_config.describe import describe_dtype_config, describe_entry, mode_of
from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.fusers import Fuser, in_reversed_order
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.leave_float import LeaveFloat
from backquant.backend_config.naming import operator_label
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern import NormalPattern, Pattern
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.dtypes import Granularity
from backquant.errors import SpecError
from backquant.pages import Document, Listing, Section, Table, letters_of

__all__ = [
    "get_fused_module_classes",
    "get_fuser_method_mapping",
    "get_fusion_pattern_to_extra_inputs_getter",
    "get_fusion_pattern_to_root_node_getter",
    "get_module_to_qat_module",
    "get_pattern_to_dtype_configs",
    "get_pattern_to_input_type_to_index",
    "get_qat_module_classes",
    "get_root_module_to_quantized_reference_module",
]

_Module = type[torch.nn.Module]
_Value = TypeVar("_Value")


def get_pattern_to_dtype_configs(backend_config: BackendConfig) -> dict[Pattern, list[DTypeConfig]]:
    """The admitted dtype combinations of every pattern.

    >>> add = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(torch.quint8))
    >>> backend = BackendConfig().set_backend_pattern_config(add)
    >>> get_pattern_to_dtype_configs(backend)[torch.add]
    [DTypeConfig(input_dtype=torch.quint8)]
    """
    by_pattern = backend_config._pattern_complex_format_to_config
    return {pattern: config.dtype_configs for pattern, config in by_pattern.items()}


def get_qat_module_classes(backend_config: BackendConfig) -> tuple[_Module, ...]:
    """The modules that training uses, each once, in the order of the entries.

    >>> from backquant.backend_config import get_backend_config
    >>> get_qat_module_classes(get_backend_config("qnnpack"))[0]
    <class 'backquant.nn.qat.conv.Conv1d'>
    """
    return _distinct(config.qat_module for config in backend_config.shared_configs)


def get_fused_module_classes(backend_config: BackendConfig) -> tuple[_Module, ...]:
    """The modules that patterns are fused into, each once, in the order of the entries.

    >>> from backquant.backend_config import get_backend_config
    >>> get_fused_module_classes(get_backend_config("qnnpack"))[0]
    <class 'backquant.nn.intrinsic.fused.ConvReLU1d'>
    """
    return _distinct(config.fused_module for config in backend_config.shared_configs)


def get_pattern_to_input_type_to_index(
    backend_config: BackendConfig,
) -> dict[Pattern, dict[str, int]]:
    """Argument positions of weight and bias of every pattern; empty where the spec names none.

    >>> entry = BackendPatternConfig(torch.nn.functional.linear)
    >>> entry = entry._set_input_type_to_index({"weight": 1})
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> get_pattern_to_input_type_to_index(backend)[torch.nn.functional.linear]
    {'weight': 1}
    """
    by_pattern = backend_config._pattern_complex_format_to_config
    return {pattern: config._input_type_to_index for pattern, config in by_pattern.items()}


def get_root_module_to_quantized_reference_module(
    backend_config: BackendConfig,
) -> dict[_Module, _Module]:
    """Root module → reference module, of the entries that name both; the last entry decides.

    >>> from backquant.backend_config import get_backend_config
    >>> get_root_module_to_quantized_reference_module(get_backend_config("qnnpack"))[torch.nn.Linear]
    <class 'backquant.nn.quantized.reference.linear.Linear'>
    """
    mapping: dict[_Module, _Module] = {}
    for config in backend_config.shared_configs:
        root, reference = config.root_module, config.reference_quantized_module
        if root is not None and reference is not None:
            mapping[root] = reference
    return mapping


def get_fuser_method_mapping(backend_config: BackendConfig) -> dict[Pattern, Fuser]:
    """Pattern → fuser, where there is one; it takes its modules in the order of the key.

    Raises ``SpecError`` for a fuser on a single operator: there is nothing to fuse.

    >>> from backquant.backend_config import SequentialFuser
    >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))
    >>> entry = entry.set_fuser_method(SequentialFuser(torch.nn.Sequential))
    >>> mapping = get_fuser_method_mapping(BackendConfig().set_backend_pattern_config(entry))
    >>> mapping[(torch.nn.ReLU, torch.nn.Linear)](False, torch.nn.ReLU(), torch.nn.Linear(1, 1))[1]
    ReLU()
    """
    mapping: dict[Pattern, Fuser] = {}
    for pattern, config in backend_config._pattern_complex_format_to_config.items():
        if config.fuser_method is None:
            continue
        if config.pattern is None or isinstance(config.pattern, (GraphPattern, NormalPattern)):
            mapping[pattern] = config.fuser_method
        elif isinstance(config.pattern, tuple):
            mapping[pattern] = in_reversed_order(config.fuser_method)
        else:
            raise SpecError(
                f"{config.normal_pattern} is a single operator and has a fuser",
                where="fuser_method",
                fix="set the fuser on the tuple pattern that it fuses",
            )
    return mapping


def get_module_to_qat_module(backend_config: BackendConfig) -> dict[Pattern, _Module]:
    """Pattern → the module that training uses, where there is one.

    >>> entry = BackendPatternConfig(torch.nn.Linear).set_qat_module(torch.nn.Linear)
    >>> len(get_module_to_qat_module(BackendConfig().set_backend_pattern_config(entry)))
    1
    """
    return _field_by_pattern(backend_config, lambda config: config.qat_module)


def get_fusion_pattern_to_root_node_getter(
    backend_config: BackendConfig,
) -> dict[Pattern, Callable[..., Any]]:
    """Pattern → ``f(node pattern) -> node`` that finds the root, where the entry names one.

    The node pattern is shaped like the key, with nodes for operators. Without a getter, the root is
    the last item of the innermost last tuple.

    >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))._set_root_node_getter(len)
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> get_fusion_pattern_to_root_node_getter(backend)[(torch.nn.ReLU, torch.nn.Linear)]
    <built-in function len>
    """
    return _field_by_pattern(backend_config, lambda config: config._root_node_getter)


def get_fusion_pattern_to_extra_inputs_getter(
    backend_config: BackendConfig,
) -> dict[Pattern, Callable[..., Any]]:
    """Pattern → ``f(node pattern) -> nodes``: the nodes that become further inputs of the fused module.

    >>> entry = BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))._set_extra_inputs_getter(len)
    >>> backend = BackendConfig().set_backend_pattern_config(entry)
    >>> get_fusion_pattern_to_extra_inputs_getter(backend)[(torch.nn.ReLU, torch.nn.Linear)]
    <built-in function len>
    """
    return _field_by_pattern(backend_config, lambda config: config._extra_inputs_getter)


def _field_by_pattern(
    backend_config: BackendConfig, field: Callable[[BackendPatternConfig], _Value | None]
) -> dict[Pattern, _Value]:
    """Pattern → value of a field, where it is set."""
    mapping: dict[Pattern, _Value] = {}
    for pattern, config in backend_config._pattern_complex_format_to_config.items():
        value = field(config)
        if value is not None:
            mapping[pattern] = value
    return mapping


def _distinct(classes: Iterable[_Module | None]) -> tuple[_Module, ...]:
    return tuple(dict.fromkeys(cls for cls in classes if cls is not None))


# Support tables of a backend, made from its description.
#
# A row is a run of entries that differ in their operators only. Columns:
#
# * ``operators``: patterns in the order in which they are registered;
# * ``modes``: static, dynamic, weight-only, float (see ``describe.mode_of``);
# * ``dtypes``: what is admitted, first choice first; rendered as letters that a legend explains;
# * ``per_channel``: whether the weight may have one scale per channel;
# * ``fused_as``, ``qat``, ``reference``: the modules that it becomes;
# * ``observation``: where observers stand.

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
