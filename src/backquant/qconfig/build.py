"""From a backend's defaults (data) to observer factories and QConfigs."""

from __future__ import annotations

from typing import Any

from backquant.backend_config import BackendDefaults, DefaultOverride, QuantDefault
from backquant.errors import ConfigError
from backquant.observe import (
    BlockMinMaxObserver,
    BlockMSEObserver,
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    ReuseInputObserver,
)
from backquant.observe.partial import with_args
from backquant.qconfig.qconfig import QConfig

_OBSERVERS: dict[str, Any] = {
    "histogram": HistogramObserver,
    "minmax": MinMaxObserver,
    "moving_average_minmax": MovingAverageMinMaxObserver,
    "per_channel_minmax": PerChannelMinMaxObserver,
    "moving_average_per_channel_minmax": MovingAveragePerChannelMinMaxObserver,
    "block_minmax": BlockMinMaxObserver,
    "block_mse": BlockMSEObserver,
    "placeholder": PlaceholderObserver,
    "noop": NoopObserver,
    "reuse_input": ReuseInputObserver,
}
_FAKE_QUANTIZES: dict[str, Any] = {
    "fake_quantize": FakeQuantize,
    "fused_moving_average": FusedMovingAvgObsFakeQuantize,
}


def observer_factory(default: QuantDefault) -> Any:
    """The observer class or factory that a ``QuantDefault`` describes.

    >>> import torch
    >>> observer_factory(QuantDefault("minmax", dtype=torch.qint8))
    MinMaxObserver.with_args(dtype=torch.qint8)
    """
    observer, options = default.observer, default.options
    if isinstance(observer, str):
        observer = _OBSERVERS[observer]
    if default.fake_quantize is not None:
        return _FAKE_QUANTIZES[default.fake_quantize].with_args(observer=observer, **options)
    return with_args(observer, **options) if options else observer


def ptq_qconfig(defaults: BackendDefaults, override: DefaultOverride | None = None) -> QConfig:
    """The QConfig for calibration: of the backend, or of the operators of one override.

    >>> ptq_qconfig(BackendDefaults(QuantDefault("histogram"), QuantDefault("minmax")))
    QConfig(activation=HistogramObserver, weight=MinMaxObserver)
    """
    activation, weight, output = defaults.activation, defaults.weight, defaults.output
    if override is not None:
        output = override.output if override.activation else override.output or output
        activation, weight = override.activation or activation, override.weight or weight
    return _qconfig(activation, weight, output)


def _qconfig(
    activation: QuantDefault, weight: QuantDefault, output: QuantDefault | None
) -> QConfig:
    of_output = None if output is None else observer_factory(output)
    return QConfig(observer_factory(activation), observer_factory(weight), of_output)


def qat_qconfig(defaults: BackendDefaults, override: DefaultOverride | None = None) -> QConfig:
    """The QConfig for training: of the backend, or of the operators of one override.

    Raises ConfigError when the backend has no defaults for training.

    >>> fused = QuantDefault("moving_average_minmax", fake_quantize="fused_moving_average")
    >>> minmax = QuantDefault("minmax")
    >>> qat_qconfig(BackendDefaults(minmax, minmax, fused, fused)).weight
    FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
    """
    activation, weight, output = defaults.qat_activation, defaults.qat_weight, defaults.qat_output
    if override is not None:
        output = override.qat_output if override.qat_activation else override.qat_output or output
        activation = override.qat_activation or activation
        weight = override.qat_weight or weight
    if activation is None or weight is None:
        raise ConfigError(
            "the backend names no defaults for training",
            where="BackendDefaults: qat_activation, qat_weight",
            fix="set both in the backend's defaults, or pass a QConfigMapping of your own",
        )
    return _qconfig(activation, weight, output)
