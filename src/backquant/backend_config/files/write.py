"""A backend description as plain data: strings, numbers, lists and dicts in the layout of ``models``.

Equal dtype configs get one name, and the entries refer to it. Consecutive entries that differ in
their pattern only are written as one entry with ``patterns``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from backquant.backend_config.conditions import condition_data
from backquant.backend_config.config import BackendConfig
from backquant.backend_config.defaults import BackendDefaults
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.files.models import SCHEMA_VERSION
from backquant.backend_config.files.names import SpellingError, path_of
from backquant.backend_config.files.scalars import number_data
from backquant.backend_config.files.spelling import callable_data, pattern_data
from backquant.backend_config.observation import ObservationType
from backquant.backend_config.pattern_config import BackendPatternConfig
from backquant.backend_config.ports import Port
from backquant.backend_config.qdq import OPERATOR_FIELDS, QDQRules
from backquant.dtypes import dtype_name, integer_range
from backquant.errors import SpecError

_MODULES = ("root_module", "qat_module", "reference_quantized_module", "fused_module")
_CALLABLES = {
    "fuser_method": "fuser_method",
    "root_node_getter": "_root_node_getter",
    "extra_inputs_getter": "_extra_inputs_getter",
    "overwrite_output_fake_quantize": "_overwrite_output_fake_quantize",
    "overwrite_output_observer": "_overwrite_output_observer",
}


def to_data(config: BackendConfig) -> dict[str, Any]:
    """The content of a spec file for ``config``.

    Raises ``SpecError`` naming the entry and the field that holds something without an import path
    (a lambda, a closure), or a number that is not finite.

    >>> from backquant.backend_config import DTypeConfig
    >>> static = DTypeConfig(torch.quint8, torch.quint8)
    >>> entry = BackendPatternConfig(torch.add).add_dtype_config(static)
    >>> to_data(BackendConfig("mine").set_backend_pattern_config(entry))["entries"]
    [{'pattern': 'torch.add', 'dtype_configs': ['quint8']}]
    """
    names = _Names()
    entries: list[dict[str, Any]] = []
    for index, entry in enumerate(config.configs):
        place = f"configs[{index}] {entry.normal_pattern}"
        entries.append(_entry(entry, names, place))
    data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "name": config.name}
    if config.engine is not None:
        data["engine"] = config.engine
    if config.defaults is not None:
        data["defaults"] = _named(lambda: _defaults(config.defaults), "defaults")
    if config.qdq is not None:
        data["qdq"] = _named(lambda: _qdq(config.qdq), "qdq")
    if config.slower:
        data["slower"] = [_slower(record.to_dict()) for record in config.slower]
    if names.by_name:
        data["dtype_configs"] = names.by_name
    data["entries"] = _grouped(entries)
    return data


class _Names:
    """Names for dtype configs, in order of first use."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}
        self._by_content: dict[str, str] = {}

    def name(self, config: DTypeConfig) -> str:
        data = _dtype_config(config)
        content = json.dumps(data)
        if content not in self._by_content:
            base = name = _descriptive_name(config)
            number = 2
            while name in self.by_name:
                name = f"{base}_{number}"
                number += 1
            self.by_name[name] = data
            self._by_content[content] = name
        return self._by_content[content]


def _descriptive_name(config: DTypeConfig) -> str:
    """Such as ``quint8``, ``quint8_weight_qint8``, ``dynamic_quint8_weight_qint8``."""
    words = ["dynamic"] if config.is_dynamic else []
    if config.input_dtype is not None:
        words.append(dtype_name(config.input_dtype))
    differs = config.output_dtype not in (config.input_dtype, None)
    if config.output_dtype is not None and differs and not config.is_dynamic:
        words += ["to", dtype_name(config.output_dtype)]
    if config.weight_dtype is not None:
        words += ["weight", dtype_name(config.weight_dtype)]
    return "_".join([*words, *_fixed_range(config.output_dtype_with_constraints)]) or "any"


def _fixed_range(given: DTypeWithConstraints) -> list[str]:
    """``from_-1_to_1`` for fixed qparams: the real range that a byte covers with them."""
    scale, zero_point = given.scale_exact_match, given.zero_point_exact_match
    limits = integer_range(given.dtype)
    if scale is None or zero_point is None or limits is None:
        return []
    low, high = ((bound - zero_point) * scale for bound in (limits[0], limits[1] + 1))
    return ["from", f"{low:g}", "to", f"{high:g}"]


def _dtype_config(config: DTypeConfig) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for role in ("input_dtype", "output_dtype", "weight_dtype"):
        constrained = getattr(config, f"{role}_with_constraints")
        if constrained != DTypeWithConstraints():
            data[role] = _constraints(constrained)
    if config.bias_dtype is not None:
        data["bias_dtype"] = dtype_name(config.bias_dtype)
    for name in ("is_dynamic", "bias_scale", "rounding", "requantization", "table_entries"):
        if getattr(config, name) is not None:
            data[name] = getattr(config, name)
    if config.tolerance is not None:
        data["tolerance"] = config.tolerance.to_dict()
    if config.requantization_ratio is not None:
        data["requantization_ratio"] = _scalar(config.requantization_ratio)
    if config.bias_step_upper_bound is not None:
        data["bias_step_upper_bound"] = _scalar(config.bias_step_upper_bound)
    if config.where is not None:
        data["where"] = condition_data(config.where)
    return data


def _constraints(constrained: DTypeWithConstraints) -> Any:
    given = {field.name: getattr(constrained, field.name) for field in fields(constrained)}
    data = {name: _scalar(value) for name, value in given.items() if value is not None}
    return data["dtype"] if list(data) == ["dtype"] else data


def _scalar(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.qscheme):
        return str(value).removeprefix("torch.")
    if isinstance(value, type):
        return path_of(value)
    if isinstance(value, tuple):
        return [None if one is None else number_data(one) for one in value]
    return number_data(value)


def _defaults(defaults: BackendDefaults | None) -> Any:
    assert defaults is not None  # the caller asked
    return _defaults_data(defaults.to_dict())


def _qdq(rules: QDQRules | None) -> Any:
    assert rules is not None  # the caller asked
    data = rules.to_dict()
    for name in OPERATOR_FIELDS:
        if name in data:
            data[name] = [pattern_data(operator) for operator in data[name]]
    if "leave_float" in data:
        data["leave_float"] = [_defaults_data(rule) for rule in data["leave_float"]]
    return data


def _slower(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, **{name: number_data(data[name]) for name in ("integer_us", "float_us")}}


def _defaults_data(value: Any) -> Any:
    if not isinstance(value, dict):
        return _scalar(value)
    data = {}
    for name, item in value.items():
        if name in ("operators", "after", "before"):
            data[name] = [pattern_data(operator) for operator in item]
        elif name in ("overrides", "leave_float"):
            data[name] = [_defaults_data(override) for override in item]
        else:
            data[name] = _defaults_data(item)
    return data


def _entry(entry: BackendPatternConfig, names: _Names, place: str) -> dict[str, Any]:
    reversed_form = entry.pattern is None
    pattern = entry._pattern_complex_format if reversed_form else entry.pattern
    data: dict[str, Any] = {
        "pattern": _named(lambda: pattern_data(pattern, reversed_form), f"{place}: pattern")
    }
    if entry.observation_type is not ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT:
        data["observation_type"] = entry.observation_type.name
    counts = entry._num_tensor_args_to_observation_type
    if counts:
        data["num_tensor_args_to_observation_type"] = {
            count: kind.name for count, kind in counts.items()
        }
    if entry._input_output_observed is not None:
        data["input_output_observed"] = entry._input_output_observed
    if entry.dtype_configs:
        data["dtype_configs"] = [
            _named(lambda c=config: names.name(c), f"{place}: dtype_configs[{index}]")  # type: ignore[misc]
            for index, config in enumerate(entry.dtype_configs)
        ]
    if entry._input_type_to_index:
        data["input_type_to_index"] = dict(entry._input_type_to_index)
    if entry.where is not None:
        data["where"] = condition_data(entry.where)
    if entry.ports:
        data["ports"] = {name: _port(port) for name, port in entry.ports.items()}
    _add_names(data, entry, place)
    return data


def _port(port: Port) -> Any:
    return port.role if port.shares_with is None else {"shares_with": port.shares_with}


def _add_names(data: dict[str, Any], entry: BackendPatternConfig, place: str) -> None:
    for field, attribute in {**dict(zip(_MODULES, _MODULES, strict=True)), **_CALLABLES}.items():
        value = getattr(entry, attribute)
        if value is not None:
            data[field] = _named(lambda v=value: callable_data(v), f"{place}: {field}")  # type: ignore[misc]


def _named(make: Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except SpellingError as problem:
        raise SpecError(
            f"cannot be stored: {problem.what}", where=place, fix=problem.fix
        ) from problem


def _grouped(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of entries that differ in their pattern only, as one entry with ``patterns``."""
    groups: list[tuple[dict[str, Any], list[Any]]] = []
    for entry in entries:
        pattern = entry.pop("pattern")
        if groups and groups[-1][0] == entry and list(groups[-1][0]) == list(entry):
            groups[-1][1].append(pattern)
        else:
            groups.append((entry, [pattern]))
    return [
        {"pattern": patterns[0], **fields}
        if len(patterns) == 1
        else {"patterns": patterns, **fields}
        for fields, patterns in groups
    ]
