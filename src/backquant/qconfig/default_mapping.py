"""The QConfigMapping that a backend gets when the user asks for nothing in particular.

Rules, as PyTorch orders them:

1. global: the backend's defaults for activation and weight.
2. the overrides of the backend's defaults, by operator.
3. operators with fixed qparams: every entry whose output dtype carries an exact scale and zero
   point gets an observer with just these.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
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
from backquant.backend_config.config import Backend, resolve_backend
from backquant.backend_config.naming import operator_records
from backquant.dtypes import Granularity, dtype_name, is_quantized, is_scaled_float, quantize_bounds
from backquant.errors import ConfigError, UnknownBackendError
from backquant.observe import (
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    default_weight_fake_quant,
    default_weight_observer,
)
from backquant.qconfig.build import ptq_qconfig, qat_qconfig
from backquant.qconfig.mapping import QConfigMapping
from backquant.qconfig.qconfig import QConfig


def get_default_qconfig(backend: Backend = "x86", version: int = 0) -> QConfig:
    """The QConfig for calibration that a backend's description implies.

    ``backend``: a name, a file, or a BackendConfig. ``version`` is 0, as in PyTorch.
    Raises UnknownBackendError, or ConfigError when the description names no integer dtypes.

    >>> get_default_qconfig("x86").activation
    HistogramObserver.with_args(reduce_range=True)
    """
    _check_version(version, (0,))
    return ptq_qconfig(_defaults(resolve_backend(backend, UnknownBackendError)))


def get_default_qat_qconfig(backend: Backend = "x86", version: int = 1) -> QConfig:
    """The QConfig for training that a backend's description implies.

    ``version`` 1 measures and rounds in one kernel, 0 in two modules. Raises as
    ``get_default_qconfig``.

    >>> get_default_qat_qconfig("qnnpack").activation().quant_max
    255
    """
    _check_version(version, (0, 1))
    return qat_qconfig(
        _defaults(resolve_backend(backend, UnknownBackendError)).for_qat_version(version)
    )


def get_default_qconfig_mapping(backend: Backend = "x86", version: int = 0) -> QConfigMapping:
    """The mapping for calibration that a backend's description implies (rules 1 to 3).

    ``backend``: a name, a file, or a BackendConfig. Raises as ``get_default_qconfig``.

    >>> import torch
    >>> get_default_qconfig_mapping("fbgemm").object_type_qconfigs[torch.sigmoid].activation
    FixedQParamsObserver.with_args(scale=0.00390625, zero_point=0, dtype=torch.quint8, \
quant_min=0, quant_max=255)
    """
    _check_version(version, (0,))
    config = resolve_backend(backend, UnknownBackendError)
    return mapping_with_defaults(config, _defaults(config))


def mapping_with_defaults(config: BackendConfig, defaults: BackendDefaults) -> QConfigMapping:
    """The mapping for calibration on ``config`` with other defaults than its own: a new object.

    >>> x86 = resolve_backend("x86")
    >>> mapping_with_defaults(x86, x86.defaults) == get_default_qconfig_mapping(x86)
    True
    """
    key = (mapping_with_defaults, defaults)
    return copy(config.derived(key, lambda found: _mapping(found, defaults)))


def _mapping(config: BackendConfig, defaults: BackendDefaults) -> QConfigMapping:
    mapping = QConfigMapping().set_global(ptq_qconfig(defaults))
    for operator, override in _everywhere(config, defaults):
        mapping.set_object_type(operator, ptq_qconfig(defaults, override))
    for operator, observer, measured in _fixed_qparams(config, mapping.global_qconfig):
        qconfig = QConfig(observer, default_weight_observer)
        if measured:
            qconfig = QConfig(_of_input(mapping, operator), qconfig.weight, observer)
        mapping.set_object_type(operator, qconfig)
    return mapping.as_default_of(config.name)


def get_default_qat_qconfig_mapping(backend: Backend = "x86", version: int = 1) -> QConfigMapping:
    """The mapping for training that a backend's description implies (rules 1 to 3).

    Arguments and errors as of ``get_default_qat_qconfig``.

    >>> mapping = get_default_qat_qconfig_mapping("x86")
    >>> type(mapping.object_type_qconfigs["tanh"].activation()).__name__
    'FixedQParamsFakeQuantize'
    """
    _check_version(version, (0, 1))
    config = resolve_backend(backend, UnknownBackendError)
    defaults = _defaults(config).for_qat_version(version)
    mapping = QConfigMapping().set_global(qat_qconfig(defaults))
    for operator, override in _everywhere(config, defaults):
        mapping.set_object_type(operator, qat_qconfig(defaults, override))
    for operator, observer, measured in _fixed_qparams(config, mapping.global_qconfig):
        fixed = FixedQParamsFakeQuantize.with_args(observer=observer)
        qconfig = QConfig(fixed, default_weight_fake_quant)
        if measured:
            qconfig = QConfig(_of_input(mapping, operator), qconfig.weight, fixed)
        mapping.set_object_type(operator, qconfig)
    return mapping.as_default_of(config.name)


def _everywhere(
    config: BackendConfig, defaults: BackendDefaults
) -> Iterator[tuple[Any, DefaultOverride]]:
    """The operators with overrides that hold whatever stands around, each with its own. Scales per channel
    are along the channels that an operator gives; an axis that is named stands, and an empty override."""
    own = [override for override in defaults.overrides if not override.between_float_operators]
    named = {operator for override in own for operator in override.operators}
    for override in own:
        for operator in override.operators:
            along = override.roles() and _along_channels(operator, override, defaults)
            yield operator, along or override
    for operator in _weighted_operators(config):
        found = _along_channels(operator, DefaultOverride((operator,)), defaults)
        if operator not in named and found is not None:
            yield operator, found


def _along_channels(
    operator: Any, override: DefaultOverride, defaults: BackendDefaults
) -> DefaultOverride | None:
    """The override with the axis of the channels; ``None`` where that is the first, or needs none."""
    axis = _channel_axis(operator)
    if not axis:
        return None
    roles = ("weight", "qat_weight")
    asked = {role: getattr(override, role) or getattr(defaults, role) for role in roles}
    found = {role: replace(one, ch_axis=axis) for role, one in asked.items() if _needs_axis(one)}
    return replace(override, **found) if found else None


def _needs_axis(weight: QuantDefault | None) -> bool:
    per_channel = (torch.per_channel_symmetric, torch.per_channel_affine)
    return weight is not None and weight.qscheme in per_channel and weight.ch_axis is None


def _weighted_operators(config: BackendConfig) -> Iterator[Any]:
    """The operators that an entry quantizes the weights of, with a scale per channel if that is asked for."""
    for entry in config.shared_configs:
        weights = [c.weight_dtype_with_constraints for c in entry.dtype_configs if _is_static(c)]
        if entry.normal_pattern.size == 1 and any(
            weight.dtype is not None and (weight.granularity is None or _per_channel(weight))
            for weight in weights
        ):
            yield entry.normal_pattern.anchor.op


def _channel_axis(op: Any) -> int:
    """The axis of a weight that the channels which come out are on."""
    records = operator_records()
    known = records.find_root(op) if isinstance(op, type) else records.find(op)
    return 0 if known is None else known.weight_channel_axis or 0


def _defaults(config: BackendConfig) -> BackendDefaults:
    return config.defaults or config.derived(derive_defaults, derive_defaults)


def _fixed_qparams(config: BackendConfig, qconfig: QConfig) -> list[tuple[Any, Any, bool]]:
    """Operator, observer factory, and whether its input has to be measured, of every single-operator entry
    with fixed qparams.

    Of several dtype configs, the one with the dtype of the global QConfig counts, else the first.
    """
    preferred = qconfig.activation().dtype
    found: list[tuple[Any, Any, bool]] = []
    for entry in config.shared_configs:
        fixed = [c for c in entry.dtype_configs if _is_fixed(c.output_dtype_with_constraints)]
        if not fixed or entry.normal_pattern.size != 1:
            continue
        admitted = next((c for c in fixed if c.output_dtype == preferred), fixed[0])
        chosen, given = (
            admitted.output_dtype_with_constraints,
            admitted.input_dtype_with_constraints,
        )
        assert chosen.dtype is not None
        low, high = quantize_bounds(chosen.dtype)
        observer = FixedQParamsObserver.with_args(
            scale=chosen.scale_exact_match,
            zero_point=chosen.zero_point_exact_match or 0,
            dtype=chosen.dtype,
            quant_min=_or(chosen.quant_min_lower_bound, low),
            quant_max=_or(chosen.quant_max_upper_bound, high),
        )
        # PyTorch's requests for such operators name the observer of the output only
        measured = not _is_fixed(given) and (
            given.symmetric is not None or given.dtype != chosen.dtype
        )
        found.append((entry.normal_pattern.anchor.op, observer, measured))
    return found


def _of_input(mapping: QConfigMapping, operator: Any) -> Any:
    """The observer factory of what an operator with a fixed output reads."""
    return mapping.object_type_qconfigs.get(operator, mapping.global_qconfig).activation


def _is_fixed(given: DTypeWithConstraints) -> bool:
    return given.dtype is not None and given.scale_exact_match is not None


def _or(value: float | None, otherwise: int) -> int:
    return otherwise if value is None else int(value)


def _check_version(version: int, known: tuple[int, ...]) -> None:
    if version not in known:
        raise ConfigError(
            f"there is no version {version!r} of this default",
            where=f"version={version!r}",
            fix="version=" + " or ".join(map(str, known)),
        )


# Defaults for a backend whose description names none: what its entries admit first.


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
    static = [c for e in config.shared_configs for c in e.dtype_configs if _is_static(c)]
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
        for entry in config.shared_configs
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
    for entry in config.shared_configs:
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
    axis = _channel_axis(entry.normal_pattern.anchor.op)
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
