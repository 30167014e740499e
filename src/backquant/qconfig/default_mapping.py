"""The QConfigMapping that a backend gets when the user asks for nothing in particular.

Rules, as PyTorch orders them:

1. global: the backend's defaults for activation and weight.
2. the overrides of the backend's defaults, by operator.
3. operators with fixed qparams: every entry whose output dtype carries an exact scale and zero
   point gets an observer with just these.
"""

from __future__ import annotations

from typing import Any

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    DefaultOverride,
    DTypeWithConstraints,
)
from backquant.backend_config.registry import Backend, resolve_backend
from backquant.dtypes import quantize_bounds
from backquant.errors import ConfigError, UnknownBackendError
from backquant.observe import (
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    default_weight_fake_quant,
    default_weight_observer,
)
from backquant.qconfig.build import ptq_qconfig, qat_qconfig
from backquant.qconfig.derive import derive_defaults
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
    defaults = _defaults(config)
    mapping = QConfigMapping().set_global(ptq_qconfig(defaults))
    for override in _everywhere(defaults):
        for operator in override.operators:
            mapping.set_object_type(operator, ptq_qconfig(defaults, override))
    for operator, observer, measured in _fixed_qparams(config, mapping.global_qconfig):
        qconfig = QConfig(observer, default_weight_observer)
        if measured:
            qconfig = QConfig(_of_input(mapping, operator), qconfig.weight, observer)
        mapping.set_object_type(operator, qconfig)
    return mapping


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
    for override in _everywhere(defaults):
        for operator in override.operators:
            mapping.set_object_type(operator, qat_qconfig(defaults, override))
    for operator, observer, measured in _fixed_qparams(config, mapping.global_qconfig):
        fixed = FixedQParamsFakeQuantize.with_args(observer=observer)
        qconfig = QConfig(fixed, default_weight_fake_quant)
        if measured:
            qconfig = QConfig(_of_input(mapping, operator), qconfig.weight, fixed)
        mapping.set_object_type(operator, qconfig)
    return mapping


def _everywhere(defaults: BackendDefaults) -> list[DefaultOverride]:
    """The overrides that hold whatever stands around the operators."""
    return [override for override in defaults.overrides if not override.between_float_operators]


def _defaults(config: BackendConfig) -> BackendDefaults:
    return derive_defaults(config) if config.defaults is None else config.defaults


def _fixed_qparams(config: BackendConfig, qconfig: QConfig) -> list[tuple[Any, Any, bool]]:
    """Operator, observer factory, and whether its input has to be measured, of every single-operator entry
    with fixed qparams.

    Of several dtype configs, the one with the dtype of the global QConfig counts, else the first.
    """
    preferred = qconfig.activation().dtype
    found: list[tuple[Any, Any, bool]] = []
    for entry in config.configs:
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
