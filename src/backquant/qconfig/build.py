"""From a backend's defaults (data) to observer factories and QConfigs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
    default_debug_observer,
    default_dynamic_fake_quant,
    default_dynamic_quant_observer,
    default_embedding_fake_quant,
    default_embedding_fake_quant_4bit,
    default_fake_quant,
    default_float_qparams_observer,
    default_float_qparams_observer_4bit,
    default_fused_act_fake_quant,
    default_fused_wt_fake_quant,
    default_observer,
    default_per_channel_weight_observer,
    default_placeholder_observer,
    default_reuse_input_observer,
    default_weight_fake_quant,
    default_weight_observer,
    fused_per_channel_wt_fake_quant_range_neg_127_to_127,
    fused_wt_fake_quant_range_neg_127_to_127,
    per_channel_weight_observer_range_neg_127_to_127,
    weight_observer_range_neg_127_to_127,
)
from backquant.observe.protocol import with_args
from backquant.qconfig.qconfig import QConfig

__all__ = [
    "default_qconfig",
    "default_per_channel_qconfig",
    "default_debug_qconfig",
    "default_quint8_weight_qconfig",
    "default_reuse_input_qconfig",
    "default_symmetric_qnnpack_qconfig",
    "default_per_channel_symmetric_qnnpack_qconfig",
    "default_dynamic_qconfig",
    "per_channel_dynamic_qconfig",
    "float16_dynamic_qconfig",
    "float16_static_qconfig",
    "float_qparams_weight_only_qconfig",
    "float_qparams_weight_only_qconfig_4bit",
    "default_qat_qconfig",
    "default_qat_qconfig_v2",
    "default_dynamic_qat_qconfig",
    "default_weight_only_qconfig",
    "default_activation_only_qconfig",
    "default_embedding_qat_qconfig",
    "default_embedding_qat_qconfig_4bit",
    "default_symmetric_qnnpack_qat_qconfig",
    "default_per_channel_symmetric_qnnpack_qat_qconfig",
]

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


# The named default QConfigs, with the settings PyTorch gives them.

default_qconfig = QConfig(activation=default_observer, weight=default_weight_observer)
default_per_channel_qconfig = QConfig(
    activation=default_observer, weight=default_per_channel_weight_observer
)
default_debug_qconfig = QConfig(activation=default_debug_observer, weight=default_weight_observer)
default_quint8_weight_qconfig = QConfig(activation=HistogramObserver, weight=MinMaxObserver)
default_reuse_input_qconfig = QConfig(activation=default_reuse_input_observer, weight=NoopObserver)

# Signed activations, and weights without -128, for XNNPACK's kernels under qnnpack. The smallest
# scale keeps input scale * weight scale / output scale above XNNPACK's lower limit of 2**-32.
_signed_histogram = HistogramObserver.with_args(dtype=torch.qint8, reduce_range=False, eps=2**-12)
default_symmetric_qnnpack_qconfig = QConfig(
    activation=_signed_histogram, weight=weight_observer_range_neg_127_to_127
)
default_per_channel_symmetric_qnnpack_qconfig = QConfig(
    activation=_signed_histogram, weight=per_channel_weight_observer_range_neg_127_to_127
)
default_dynamic_qconfig = QConfig(
    activation=default_dynamic_quant_observer, weight=default_weight_observer
)
per_channel_dynamic_qconfig = QConfig(
    activation=default_dynamic_quant_observer, weight=default_per_channel_weight_observer
)
float16_dynamic_qconfig = QConfig(
    activation=PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=True),
    weight=PlaceholderObserver.with_args(dtype=torch.float16),
)
float16_static_qconfig = QConfig(
    activation=PlaceholderObserver.with_args(dtype=torch.float16),
    weight=PlaceholderObserver.with_args(dtype=torch.float16),
)
float_qparams_weight_only_qconfig = QConfig(
    activation=default_placeholder_observer, weight=default_float_qparams_observer
)
float_qparams_weight_only_qconfig_4bit = QConfig(
    activation=default_placeholder_observer, weight=default_float_qparams_observer_4bit
)
default_qat_qconfig = QConfig(activation=default_fake_quant, weight=default_weight_fake_quant)
default_qat_qconfig_v2 = QConfig(
    activation=default_fused_act_fake_quant, weight=default_fused_wt_fake_quant
)
default_dynamic_qat_qconfig = QConfig(
    activation=default_dynamic_fake_quant, weight=default_weight_fake_quant
)
default_weight_only_qconfig = QConfig(activation=nn.Identity, weight=default_weight_fake_quant)
default_activation_only_qconfig = QConfig(activation=default_fake_quant, weight=nn.Identity)
default_embedding_qat_qconfig = QConfig(
    activation=NoopObserver.with_args(dtype=torch.float32), weight=default_embedding_fake_quant
)
default_embedding_qat_qconfig_4bit = QConfig(
    activation=NoopObserver.with_args(dtype=torch.float32),
    weight=default_embedding_fake_quant_4bit,
)
_signed_fused = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    reduce_range=False,
    eps=2**-12,
)
default_symmetric_qnnpack_qat_qconfig = QConfig(
    activation=_signed_fused, weight=fused_wt_fake_quant_range_neg_127_to_127
)
default_per_channel_symmetric_qnnpack_qat_qconfig = QConfig(
    activation=_signed_fused, weight=fused_per_channel_wt_fake_quant_range_neg_127_to_127
)
