"""litert: ``.tflite`` files for LiteRT (TensorFlow Lite), TensorFlow Lite for Microcontrollers and NPU
compilers.

Source: LiteRT 8-bit quantization specification (``quantization_spec``), and the kernels of LiteRT 2.3.

1. Activations are signed 8-bit with any zero point; weights signed 8-bit, symmetric, without -128, one scale
   per output channel (products of two activations: none). Biases are int32 in steps of input × weight scale.
2. Results of softmax and sigmoid are in steps of 1/256 from -128, of tanh in steps of 1/128 around 0, of
   log-softmax in steps of 1/16 up to 127.
3. Poolings, concatenation, padding, resizing and what moves values keep their input's qparams.
4. In float stay norms, and functions that have no integer kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    QDQRules,
    Tolerance,
)
from backquant.backends.defaults import JOINED, RESIDUAL, SCORES, SIGNED_DEFAULTS, TABLES
from backquant.operators import clamped, conv, elementwise, entries_of, linear, shape, spellings
from backquant.operators.entry import admit, observed

ONE_STEP = Tolerance(1, "XNNPACK requantizes in float32, LiteRT's other kernels in fixed point")
ACTIVATION = DTypeWithConstraints(torch.qint8)


def _weight(**more: Any) -> DTypeWithConstraints:
    return DTypeWithConstraints(
        torch.qint8,
        quant_min_lower_bound=-127,
        quant_max_upper_bound=127,
        symmetric=True,
        **more,
    )


def _fixed(scale: float, zero_point: int) -> DTypeConfig:
    """Rule 2."""
    result = DTypeWithConstraints(
        torch.qint8, scale_exact_match=scale, zero_point_exact_match=zero_point
    )
    return DTypeConfig(ACTIVATION, result, tolerance=ONE_STEP)


VALUES = DTypeConfig(ACTIVATION, ACTIVATION, tolerance=ONE_STEP)
WEIGHTED = DTypeConfig(
    ACTIVATION,
    ACTIVATION,
    _weight(ch_axis=0),
    torch.int32,
    bias_scale="input_times_weight",
    tolerance=ONE_STEP,
)
TRANSPOSED_WEIGHT = DTypeConfig(
    ACTIVATION,
    ACTIVATION,
    _weight(ch_axis=1),
    torch.int32,
    bias_scale="input_times_weight",
    where={"groups": 1},
    tolerance=ONE_STEP,
)
UNIT, AROUND_ZERO, LOG_UNIT = _fixed(1 / 256, -128), _fixed(1 / 128, 0), _fixed(1 / 16, 127)
# the kernel divides by the places of its window that lie inside
_INSIDE: dict[str, Any] = {
    "ceil_mode": False,
    "any": [{"padding": 0}, {"count_include_pad": True}],
}
COUNTED_LINES = DTypeConfig(ACTIVATION, ACTIVATION, where=_INSIDE, tolerance=ONE_STEP)
COUNTED = DTypeConfig(
    ACTIVATION, ACTIVATION, where={**_INSIDE, "divisor_override": None}, tolerance=ONE_STEP
)
PLAIN_ELU = DTypeConfig(ACTIVATION, ACTIVATION, where={"alpha": 1}, tolerance=ONE_STEP)
# an average of the whole image is a mean; of other windows, an average pooling
VALUES_OF_ONE = DTypeConfig(
    ACTIVATION, ACTIVATION, where={"output_size": {"one_of": [1, (1,), (1, 1)]}}, tolerance=ONE_STEP
)

DEFAULTS = replace(SIGNED_DEFAULTS, leave_float=(RESIDUAL, JOINED, TABLES, SCORES))

#: Functions of one value: the result has qparams of its own.
COMPUTED = ("leaky_relu", "prelu", "gelu", "hardswish", "silu", "hardsigmoid")
MEANS: tuple[Any, ...] = spellings("mean")
WHOLE: tuple[Any, ...] = spellings("adaptive_avg_pool1d", "adaptive_avg_pool2d")
#: Rule 3.
KEPT = (
    *("relu", "relu6", "hardtanh", "clamp", "dropout", "identity", "contiguous", "clone"),
    *("flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "unflatten"),
    *("max_pool1d", "max_pool2d", "interpolate", "pad", "cat", "stack"),
    *("chunk", "split", "unbind", "select", "narrow", "expand", "repeat", "flip", "roll"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "maximum", "minimum"),
)


def _convolutions() -> list[BackendPatternConfig]:
    return [
        *(e for dims in (1, 2) for e in admit(conv.conv_entries(conv.CONV[dims]), [WEIGHTED])),
        *(
            entry
            for dims in (1, 2)
            for entry in admit(conv.transposed_entries(conv.TRANSPOSED[dims]), [TRANSPOSED_WEIGHT])
        ),
    ]


def backend_config() -> BackendConfig:
    """What LiteRT computes on integers.

    >>> config = backend_config()
    >>> config.name, config.engine
    ('litert', None)
    """
    return (
        BackendConfig("litert")
        .set_defaults(DEFAULTS)
        .set_qdq(QDQRules(attention="products"))
        .set_backend_pattern_configs(
            [
                *_convolutions(),
                *linear.entries([WEIGHTED]),
                *clamped.entries([WEIGHTED], dimensions=(1, 2)),
                *elementwise.binary_entries([VALUES], elementwise.ADD_SUB_MUL),
                *entries_of(["matmul"], [VALUES]),
                *entries_of(["softmax", "sigmoid"], [UNIT]),
                *entries_of(["tanh"], [AROUND_ZERO]),
                *entries_of(["log_softmax"], [LOG_UNIT]),
                *entries_of(COMPUTED, [VALUES]),
                *entries_of(["elu"], [PLAIN_ELU]),
                *admit([observed(each) for each in MEANS], [VALUES]),
                *entries_of(["avg_pool1d"], [COUNTED_LINES]),
                *entries_of(["avg_pool2d"], [COUNTED]),
                *admit([observed(each) for each in WHOLE], [VALUES_OF_ONE]),
                *entries_of(KEPT, [VALUES]),
                *shape.tensor_info_entries([VALUES]),
            ]
        )
    )
