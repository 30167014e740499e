"""What backends quantize with when nothing else is asked for.

What PyTorch's engines share:

1. Activations are measured with a histogram; for training with a moving average of minimum and
   maximum, observer and rounding in one kernel.
2. ``reshape`` reuses the observer of its input, where that is of ``quint8``, the one dtype of
   ``ReuseInputObserver``; elsewhere its entry says that it shares. Layer norm keeps its weight in
   float, so its weight is not observed. PReLU's weight is unsigned.
3. A transposed convolution has per-tensor weights where the engine's kernels take no others.

Fields are set only where they differ from the observer's own default, as in PyTorch's qconfigs.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendDefaults,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    LeaveFloat,
    QuantDefault,
    Tolerance,
)
from backquant.operators import clamped, elementwise, fixed_qparams, overload, shape, spellings
from backquant.operators import equivalents as catalog

TENSOR_WEIGHT = QuantDefault("minmax", dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
CHANNEL_WEIGHT = QuantDefault(
    "per_channel_minmax", dtype=torch.qint8, qscheme=torch.per_channel_symmetric
)
QAT_TENSOR_WEIGHT = QuantDefault(
    "moving_average_minmax",
    dtype=torch.qint8,
    qscheme=torch.per_tensor_symmetric,
    quant_min=-128,
    quant_max=127,
    fake_quantize="fused_moving_average",
)
QAT_CHANNEL_WEIGHT = QuantDefault(
    "moving_average_per_channel_minmax",
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
    quant_min=-128,
    quant_max=127,
    fake_quantize="fused_moving_average",
)
TRANSPOSED = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
REUSE_INPUT = QuantDefault("reuse_input")
NOOP = QuantDefault("noop")
HISTOGRAM = QuantDefault("histogram")
MINMAX = QuantDefault("minmax")
FLOAT = QuantDefault("placeholder")
RESHAPE = DefaultOverride(("reshape",), REUSE_INPUT, NOOP, REUSE_INPUT, NOOP)
FLOAT_NORMS = DefaultOverride((F.layer_norm, nn.LayerNorm), weight=FLOAT, qat_weight=FLOAT)
UNSIGNED_WEIGHT = DefaultOverride((nn.PReLU,), HISTOGRAM, MINMAX, HISTOGRAM, MINMAX)
TENSOR_TRANSPOSED = DefaultOverride(
    TRANSPOSED,
    weight=TENSOR_WEIGHT,
    qat_weight=QuantDefault(
        "moving_average_minmax",
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
        quant_min=-128,
        quant_max=127,
        reduce_range=False,
        fake_quantize="fake_quantize",
    ),
)

# as the backend's other operators: listed so that every backend has a rule for the same operators
PLAIN_TRANSPOSED = DefaultOverride(TRANSPOSED)
ADDITIONS = (operator.add, torch.add, "add")
PRODUCTS = (operator.mul, torch.mul, "mul")

# residual additions of transformers, and what is added to or multiplied with masks and rotary angles
NORMS = (nn.LayerNorm, F.layer_norm, nn.RMSNorm, F.rms_norm)
RESIDUAL = LeaveFloat(ADDITIONS, after=(nn.Linear, F.linear), before=NORMS)

# what joins a class token to the values that residual additions go on with
JOINED = LeaveFloat((*ADDITIONS, torch.cat), before=NORMS)
TABLES = LeaveFloat((*ADDITIONS, *PRODUCTS), with_table=True)

# Arithmetic that floats enter, or whose result only float operators read (squares that are summed before
# a root, a gate written out): between two conversions an integer kernel saves nothing, and rounds once more.
# The same holds of what moves, clips and averages values: where nothing behind it reads integers, what made
# the values need not round them (a convolution before a recurrent layer, a sigmoid before the output).
FIXED = tuple(pattern for pattern, _ in fixed_qparams.PATTERNS)
CLIPS = (*elementwise.RELUS, *clamped.CLAMPS)
ARITHMETIC = LeaveFloat(
    tuple(
        dict.fromkeys(
            (
                *ADDITIONS,
                *PRODUCTS,
                *shape.CAT,
                *FIXED,
                *CLIPS,
                *spellings("hardswish", "dropout"),
                *catalog.SHARING,
            )
        )
    ),
    unless_between_quantized=True,
)

# On the way to a softmax: what masks and biases were added to has no good scale. A mask of -100 leaves the
# scores a ninth of the range, and a step that is too long for them.
SOFTMAX = spellings("softmax")
SCORES = LeaveFloat((*ADDITIONS, *PRODUCTS), before=SOFTMAX)

# On PyTorch's own engines the two products of attention as well: their kernel (quantized.matmul) dequantizes
# both factors, multiplies floats and quantizes what they give. What scales and masks scores in between has no
# entry, and stands here to be looked through.
SCALES = (operator.truediv, torch.div, "div", overload("div", "Tensor"), operator.sub, torch.sub)
MASKS = (
    *(torch.where, overload("where", "self"), overload("where", "ScalarOther")),
    *("masked_fill", torch.masked_fill, overload("masked_fill", "Scalar")),
)
ATTENTION = LeaveFloat((torch.matmul, *ADDITIONS, *PRODUCTS, *SCALES, *MASKS), before=SOFTMAX)
WEIGHTED = LeaveFloat((torch.matmul,), after=SOFTMAX)
LEAVE_FLOAT = (RESIDUAL, JOINED, TABLES, ARITHMETIC, ATTENTION, WEIGHTED)

# weighted kernels that give floats as well
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, F.conv1d, F.conv2d, F.conv3d)
RESULTS = LeaveFloat((*CONVOLUTIONS, nn.Linear, F.linear), results=True)


def _trained(reduce_range: bool | None = None) -> QuantDefault:
    """The unsigned activation of quantization-aware training."""
    return QuantDefault(
        "moving_average_minmax",
        quant_min=0,
        quant_max=255,
        reduce_range=reduce_range,
        fake_quantize="fused_moving_average",
    )


FBGEMM_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", reduce_range=True),
    weight=CHANNEL_WEIGHT,
    qat_activation=_trained(reduce_range=True),
    qat_weight=QAT_CHANNEL_WEIGHT,
    overrides=(RESHAPE, TENSOR_TRANSPOSED, FLOAT_NORMS, UNSIGNED_WEIGHT),
    leave_float=LEAVE_FLOAT,
)

# as FBGEMM; but its kernels are oneDNN's, which give floats, too
X86_DEFAULTS = replace(FBGEMM_DEFAULTS, leave_float=(*LEAVE_FLOAT, RESULTS))
ONEDNN_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", reduce_range=False),
    weight=CHANNEL_WEIGHT,
    qat_activation=_trained(),
    qat_weight=QAT_CHANNEL_WEIGHT,
    overrides=(RESHAPE, PLAIN_TRANSPOSED, FLOAT_NORMS, UNSIGNED_WEIGHT),
    leave_float=(*LEAVE_FLOAT, RESULTS),
)
QNNPACK_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", reduce_range=False),
    weight=TENSOR_WEIGHT,
    qat_activation=_trained(reduce_range=False),
    qat_weight=QAT_TENSOR_WEIGHT,
    overrides=(RESHAPE, PLAIN_TRANSPOSED, FLOAT_NORMS, UNSIGNED_WEIGHT),
    leave_float=LEAVE_FLOAT,
)
QNNPACK_PT2E_DEFAULTS = BackendDefaults(
    activation=QNNPACK_DEFAULTS.activation,
    weight=QNNPACK_DEFAULTS.weight,
    qat_activation=QNNPACK_DEFAULTS.qat_activation,
    qat_weight=QNNPACK_DEFAULTS.qat_weight,
)

# within the first dtype config of every entry: signed, scales of at least 2**-12, no weight of -128
EXECUTORCH_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", dtype=torch.qint8, reduce_range=False, eps=2**-12),
    weight=QuantDefault(
        "per_channel_minmax",
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=-127,
        quant_max=127,
        eps=2**-12,
    ),
    qat_activation=QuantDefault(
        "moving_average_minmax",
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
        reduce_range=False,
        eps=2**-12,
        fake_quantize="fused_moving_average",
    ),
    qat_weight=QuantDefault(
        "moving_average_per_channel_minmax",
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=-127,
        quant_max=127,
        eps=2**-12,
        fake_quantize="fused_moving_average",
    ),
)
_INTEGER_WEIGHT = QuantDefault(
    "per_channel_minmax",
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
    quant_min=-127,
    quant_max=127,
)
_TRAINED_WEIGHT = replace(
    _INTEGER_WEIGHT,
    observer="moving_average_per_channel_minmax",
    fake_quantize="fused_moving_average",
)

#: Signed activations in their whole range, symmetric weights without -128.
SIGNED_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", dtype=torch.qint8, reduce_range=False),
    weight=_INTEGER_WEIGHT,
    qat_activation=QuantDefault(
        "moving_average_minmax",
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
        reduce_range=False,
        fake_quantize="fused_moving_average",
    ),
    qat_weight=_TRAINED_WEIGHT,
    overrides=(
        DefaultOverride(
            TRANSPOSED,
            weight=replace(_INTEGER_WEIGHT, ch_axis=1),
            qat_weight=replace(_TRAINED_WEIGHT, ch_axis=1),
        ),
    ),
)

# symmetric everywhere: TensorRT's zero point is 0
TENSORRT_DEFAULTS = BackendDefaults(
    activation=QuantDefault("histogram", dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    weight=CHANNEL_WEIGHT,
    qat_activation=QuantDefault(
        "moving_average_minmax",
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
        quant_min=-128,
        quant_max=127,
        fake_quantize="fused_moving_average",
    ),
    qat_weight=QAT_CHANNEL_WEIGHT,
    overrides=(TENSOR_TRANSPOSED,),
)


# Dtype configs that several of PyTorch's engines admit, by the kind of operator.
#
# Static: activations and weights are quantized ahead. Dynamic: the activation is quantized at each
# call. Weight only: activations stay float.


# what kernels compute otherwise than the integer reference
FLOAT32 = Tolerance(1, "requantized in float32, where the exact product is close to a tie")
AT_EACH_CALL = Tolerance(4, "the kernel measures the range at each call, and may use 7 bits of it")
IN_HALVES = Tolerance(1, "weights rounded to float16, sums in float32")
BFLOAT16 = Tolerance(
    8, "activations and results are rounded to bfloat16, before they are clamped, too"
)
HALF_SCALES = Tolerance(0.5, "scale and zero point of a row are float16")
STEP_BY_STEP = Tolerance(24, "at each step what the one before was off by is multiplied")

# FBGEMM's transposed kernel, which oneDNN's engine and x86 call too, gives undefined values for 2d kernels
# of height 2 without groups
FBGEMM_TRANSPOSED: dict[int, dict[str, Any] | None] = {
    1: None,
    2: {"any": [{"kernel_height": {"not": 2}}, {"groups": {"min": 2}}]},
    3: None,
}

# static, unsigned 8-bit activations
QUINT8 = DTypeConfig(torch.quint8, torch.quint8, tolerance=FLOAT32)
WEIGHTED_QUINT8 = DTypeConfig(
    torch.quint8, torch.quint8, torch.qint8, torch.float, tolerance=FLOAT32
)

# norms: their kernels take the weight in float
FLOAT_WEIGHT_QUINT8 = DTypeConfig(
    torch.quint8, torch.quint8, torch.float, torch.float, tolerance=FLOAT32
)


def _dynamic(dtype: torch.dtype, weight: torch.dtype, tolerance: Tolerance) -> DTypeConfig:
    return DTypeConfig(
        dtype, torch.float, weight, torch.float, is_dynamic=True, tolerance=tolerance
    )


# dynamic
DYNAMIC_INT8 = _dynamic(torch.quint8, torch.qint8, AT_EACH_CALL)
DYNAMIC_FLOAT16 = _dynamic(torch.float16, torch.float16, IN_HALVES)
RECURRENT_INT8 = _dynamic(torch.quint8, torch.qint8, STEP_BY_STEP)
RECURRENT_FLOAT16 = _dynamic(torch.float16, torch.float16, IN_HALVES)

# weight only
WEIGHT_ONLY_QUINT8 = DTypeConfig(torch.float, torch.float, torch.quint8)
WEIGHT_ONLY_QUINT4X2 = DTypeConfig(torch.float, torch.float, torch.quint4x2, tolerance=HALF_SCALES)

# XNNPACK: the scale of requantization has a lower bound, and -128 is no weight
XNNPACK_ACTIVATION = DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12)
XNNPACK_WEIGHT = DTypeWithConstraints(
    torch.qint8,
    quant_min_lower_bound=-127,
    quant_max_upper_bound=127,
    scale_min_lower_bound=2**-12,
)
SYMMETRIC_QINT8 = DTypeConfig(XNNPACK_ACTIVATION, XNNPACK_ACTIVATION, tolerance=FLOAT32)
WEIGHTED_SYMMETRIC_QINT8 = DTypeConfig(
    XNNPACK_ACTIVATION, XNNPACK_ACTIVATION, XNNPACK_WEIGHT, torch.float, tolerance=FLOAT32
)
