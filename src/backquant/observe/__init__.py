"""Measuring: observers and fake-quantizers.

The names and their meaning are those of PyTorch 2.x. New here: ``merge``, exact and independent of
order, and a ``HistogramObserver`` made for it.
"""

from backquant.dtypes import is_per_channel, is_per_tensor
from backquant.observe import defaults
from backquant.observe.base import ObserverBase, UniformQuantizationObserverBase
from backquant.observe.block import BlockMinMaxObserver, BlockMSEObserver
from backquant.observe.defaults import *  # noqa: F403  (the named defaults; see defaults.__all__)
from backquant.observe.fake_quantize import (
    FakeQuantize,
    FakeQuantizeBase,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
)
from backquant.observe.histogram import HistogramObserver
from backquant.observe.minmax import MinMaxObserver, PerChannelMinMaxObserver
from backquant.observe.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from backquant.observe.observer_state import (
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    get_observer_state_dict,
    load_observer_state_dict,
)
from backquant.observe.placeholder import (
    FixedQParamsObserver,
    NoopObserver,
    PlaceholderObserver,
    RecordingObserver,
    ReuseInputObserver,
)
from backquant.observe.protocol import (
    ObserverPartial,
    factories_equal,
    factory_hash,
    is_fake_quantize,
    is_fixed_qparams,
    is_noop,
    is_observer_or_fake_quantize,
    is_placeholder,
    is_reuse_input,
    qparam_dict,
    with_args,
    with_callable_args,
)

__all__ = [
    # bases and factories
    "ObserverBase",
    "UniformQuantizationObserverBase",
    "FakeQuantizeBase",
    "ObserverPartial",
    "factories_equal",
    "is_per_channel",
    "is_per_tensor",
    "factory_hash",
    "with_args",
    "with_callable_args",
    # observers
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "PerChannelMinMaxObserver",
    "BlockMinMaxObserver",
    "BlockMSEObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "HistogramObserver",
    "FixedQParamsObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "NoopObserver",
    "ReuseInputObserver",
    # fake-quantizers
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
    "enable_observer",
    "disable_observer",
    "enable_fake_quant",
    "disable_fake_quant",
    # state
    "get_observer_state_dict",
    "load_observer_state_dict",
    # protocol
    "is_fake_quantize",
    "is_fixed_qparams",
    "is_noop",
    "is_observer_or_fake_quantize",
    "is_placeholder",
    "is_reuse_input",
    # what an observer found
    "qparam_dict",
]
__all__ += defaults.__all__
