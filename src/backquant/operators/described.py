"""Entries of a description from the names of operators: every spelling, and what the record says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.operators.entry import admit, functional, observed, sharing, swapped
from backquant.operators.fixed_qparams import constrain
from backquant.operators.fused import fused_entries
from backquant.operators.index import named
from backquant.operators.operator import Operator, QParamsRule

__all__ = ["entries_of"]


def entries_of(
    names: Iterable[str], dtype_configs: Sequence[DTypeConfig] = ()
) -> list[BackendPatternConfig]:
    """An entry for each module, function and method of the operators of these names.

    1. An output that keeps the input's qparams shares its observer; a result that is no tensor of values
       is not observed.
    2. A weighted module becomes its reference module, for training its QAT module, which has an entry,
       too; a function says where its weight and bias are.
    3. Where the range of the output is known, ``quint8`` activations have its scale and zero point.
    4. Names joined by ``+`` are operators that run as one kernel: ``conv2d+batch_norm2d+relu``.

    Raises SpecError for a name that no operator has.

    >>> import torch
    >>> uint8 = DTypeConfig(torch.quint8, torch.quint8)
    >>> [(str(e.normal_pattern), e.observation_type.name) for e in entries_of(["relu6"], [uint8])]
    [('torch.nn.ReLU6', 'OUTPUT_SHARE_OBSERVER_WITH_INPUT'), \
('torch.nn.functional.relu6', 'OUTPUT_SHARE_OBSERVER_WITH_INPUT')]
    """
    found = []
    for name in names:
        if "+" in name:
            found += admit(fused_entries(name), dtype_configs)
        else:
            operator = named(name)
            configs = _configs(operator, dtype_configs)
            found += [entry.set_dtype_configs(configs) for entry in _entries(operator)]
    return found


def _entries(operator: Operator) -> Iterator[BackendPatternConfig]:
    for spelling in operator.calls:
        entry = _entry(operator, spelling)
        yield entry
        if entry.qat_module is not None and operator.reference is not None:
            yield swapped(entry.qat_module, spelling, operator.reference)


def _entry(operator: Operator, spelling: Any) -> BackendPatternConfig:
    if operator.shares_qparams:
        return sharing(spelling)
    if operator.qparams is QParamsRule.NONE:
        none = ObservationType.INPUT_OUTPUT_NOT_OBSERVED
        return BackendPatternConfig(spelling).set_observation_type(none)
    if not isinstance(spelling, type):
        index = operator.weight_index
        if index is None or isinstance(spelling, str):
            return observed(spelling)
        return functional(spelling, weight=index, bias=operator.bias_index)
    if not operator.is_weighted or operator.reference is None:
        return observed(spelling)
    entry = swapped(spelling, spelling, operator.reference)
    return entry if operator.qat is None else entry.set_qat_module(operator.qat)


def _configs(operator: Operator, configs: Sequence[DTypeConfig]) -> list[DTypeConfig]:
    """Rule 3; a config that says something of scales itself stays as it is."""
    fixed = operator.fixed
    if fixed is None:
        return [config.copy() for config in configs]
    return [
        config.copy() if _says_scales(config) else constrain(config, fixed) for config in configs
    ]


_OF_SCALES = ("scales", "scale_range", "scale_dtype", "scale_exact_match", "zero_point_exact_match")


def _says_scales(config: DTypeConfig) -> bool:
    demands = (config.input_dtype_with_constraints, config.output_dtype_with_constraints)
    return any(
        demand.power_of_two_scale or getattr(demand, field) is not None
        for demand in demands
        for field in _OF_SCALES
    )
