"""Defaults for a backend whose description names none: what its entries admit first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    QuantDefault,
)
from backquant.backend_config.records import operator_records
from backquant.dtypes import Granularity, dtype_name, is_quantized, is_scaled_float, quantize_bounds
from backquant.errors import ConfigError


def derive_defaults(config: BackendConfig) -> BackendDefaults:
    """Defaults that the first static quantized dtype config of the entries admits.

    An entry with a weight counts before one without. Activations are measured with a histogram
    (training: moving average), weights with minimum and maximum: per channel only where the
    entry's constraints ask for it, along the channels that come out where they name no axis. Bounds and
    smallest scale are those of the constraints.
    Narrow floats are measured by their largest magnitude, and not trained. Operators whose entries take
    other dtypes get those by an override.
    Raises ConfigError when no entry has a static quantized dtype config.

    >>> from backquant.backend_config import BackendPatternConfig, DTypeConfig
    >>> int8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float)
    >>> linear = BackendPatternConfig(torch.nn.Linear).add_dtype_config(int8)
    >>> derive_defaults(BackendConfig("mine").set_backend_pattern_config(linear)).activation
    QuantDefault('histogram', dtype=torch.qint8, qscheme=torch.per_tensor_affine)
    """
    static = [c for e in config.configs for c in e.dtype_configs if _is_static(c)]
    if not static:
        raise ConfigError(
            f"the description of {config.name!r} has no static quantized dtype config and no "
            "defaults, so nothing says what to quantize with",
            where=f"backend {config.name!r}",
            fix=_what_to_ask(config),
        )
    chosen = next((c for c in static if c.weight_dtype_with_constraints.dtype), static[0])
    activation = chosen.input_dtype_with_constraints
    weight = chosen.weight_dtype_with_constraints
    if weight.dtype is None:
        weight = DTypeWithConstraints(torch.qint8, symmetric=True)
    weight_observer = _weight_observer(weight)
    if is_scaled_float(activation.dtype):
        largest = _default(activation, "minmax", symmetric=True)
        weights = _default(weight, weight_observer, symmetric=True)
        return BackendDefaults(largest, weights, output=_float_result(chosen))
    output = chosen.output_dtype_with_constraints
    other = is_quantized(output.dtype) and output.dtype != activation.dtype
    return BackendDefaults(
        activation=_default(activation, "histogram"),
        weight=_default(weight, weight_observer, symmetric=weight.symmetric is not False),
        output=_default(output, "histogram") if other else _float_result(chosen),
        qat_activation=_trained(activation, symmetric=False),
        qat_weight=_trained(weight, symmetric=weight.symmetric is not False),
        qat_output=_trained(output, symmetric=False) if other else None,
        overrides=tuple(_overrides(config, chosen)),
    )


def _what_to_ask(config: BackendConfig) -> str:
    mapping = "pass a qconfig_mapping, or BackendConfig.set_defaults(BackendDefaults(...))"
    of_weights = (
        dtypes.weight_dtype
        for entry in config.configs
        for dtypes in entry.dtype_configs
        if is_quantized(dtypes.weight_dtype) and not is_quantized(dtypes.input_dtype)
    )
    dtype = next(of_weights, None)
    return mapping if dtype is None else f'weights="{dtype_name(dtype)}", or {mapping}'


def _float_result(config: DTypeConfig) -> QuantDefault | None:
    """Nothing is measured of a result that the entry has in float."""
    dtype = config.output_dtype
    return QuantDefault("placeholder", dtype=dtype) if dtype == torch.float32 else None


def _weight_observer(constraints: DTypeWithConstraints) -> str:
    return "per_channel_minmax" if _per_channel(constraints) else "minmax"


def _overrides(config: BackendConfig, chosen: DTypeConfig) -> Iterator[DefaultOverride]:
    """Defaults for operators whose entries admit other dtypes or weights than ``chosen``: what they
    admit first.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}  # by the fields of an override, in their order
    for entry in config.configs:
        own = [c for c in entry.dtype_configs if _is_static(c)]
        if not own or entry.normal_pattern.size != 1 or any(_suits(c, chosen, entry) for c in own):
            continue
        given, output = own[0].input_dtype_with_constraints, own[0].output_dtype_with_constraints
        weight = _by_output(own[0].weight_dtype_with_constraints, entry)
        other = is_quantized(output.dtype) and output.dtype != given.dtype
        same = weight.dtype is None or _same_weight(weight, chosen.weight_dtype_with_constraints)
        affine = weight.symmetric is False
        defaults = (
            _default(given, "histogram"),
            None if same else _default(weight, _weight_observer(weight), symmetric=not affine),
            _trained(given, symmetric=False),
            None if same else _trained(weight, symmetric=not affine),
            False,
            _default(output, "histogram") if other else None,
            _trained(output, symmetric=False) if other else None,
        )
        found.setdefault(defaults, []).append(entry.normal_pattern.anchor.op)
    for roles, operators in found.items():
        yield DefaultOverride(tuple(operators), *roles)


def _suits(config: DTypeConfig, chosen: DTypeConfig, entry: BackendPatternConfig) -> bool:
    """Whether a request for the dtypes of ``chosen`` is one for those of ``config``."""
    shares = entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    output = config.input_dtype if shares else config.output_dtype
    wanted = chosen.input_dtype if shares else chosen.output_dtype
    weight = _by_output(config.weight_dtype_with_constraints, entry)
    other = chosen.weight_dtype_with_constraints
    same = weight.dtype is None or other.dtype is None or _same_weight(weight, other)
    return same and config.input_dtype == chosen.input_dtype and output in (None, wanted)


def _same_weight(one: DTypeWithConstraints, two: DTypeWithConstraints) -> bool:
    """Whether what is asked for the second is admitted by the first, as far as both say."""
    if _per_channel(one) and one.channel_axis not in (None, two.channel_axis or 0):
        return False
    return one.dtype == two.dtype and one.granularity in (None, two.granularity or "per_tensor")


def _by_output(weight: DTypeWithConstraints, entry: BackendPatternConfig) -> DTypeWithConstraints:
    """The constraints with the axis of output channels, where it is not the first and none is named."""
    if not _per_channel(weight) or weight.channel_axis is not None:
        return weight
    op = entry.normal_pattern.anchor.op
    records = operator_records()
    known = records.find_root(op) if isinstance(op, type) else records.find(op)
    axis = known.weight_channel_axis if known is not None else 0
    return replace(weight, ch_axis=axis) if axis else weight


def _is_static(config: DTypeConfig) -> bool:
    dtype = config.input_dtype_with_constraints.dtype
    weight = config.weight_dtype_with_constraints.dtype
    shared = config.weight_dtype_with_constraints.granularity
    if shared is not None and Granularity.parse(shared).has_blocks:
        return False
    return (
        not config.is_dynamic and is_quantized(dtype) and (weight is None or is_quantized(weight))
    )


def _per_channel(constraints: DTypeWithConstraints) -> bool:
    kind = Granularity.parse(constraints.granularity).kind if constraints.granularity else ""
    return kind == "per_channel"


def _trained(constraints: DTypeWithConstraints, symmetric: bool) -> QuantDefault:
    per_channel = _per_channel(constraints)
    observer = "moving_average_per_channel_minmax" if per_channel else "moving_average_minmax"
    return _default(constraints, observer, "fused_moving_average", symmetric)


def _default(
    constraints: DTypeWithConstraints,
    observer: str,
    fake_quantize: str | None = None,
    symmetric: bool = False,
) -> QuantDefault:
    """The fused kernel has a range of its own, so training always names both bounds."""
    dtype = constraints.dtype
    assert dtype is not None
    low, high = constraints.quant_min_lower_bound, constraints.quant_max_upper_bound
    bounds: tuple[int | None, int | None] = (None, None)
    if fake_quantize is not None or low is not None or high is not None:
        smallest, largest = quantize_bounds(dtype)
        bounds = (
            smallest if low is None else int(low),
            largest if high is None else int(high),
        )
    return QuantDefault(
        observer,
        dtype=dtype,
        qscheme=_scheme(_per_channel(constraints), symmetric or bool(constraints.symmetric)),
        quant_min=bounds[0],
        quant_max=bounds[1],
        eps=constraints.scale_min_lower_bound,
        ch_axis=constraints.channel_axis if _per_channel(constraints) else None,
        fake_quantize=fake_quantize,
    )


def _scheme(per_channel: bool, symmetric: bool) -> torch.qscheme:
    if per_channel:
        return torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    return torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
