"""xnnpack: ExecuTorch's XNNPACK delegate, described by what its partitioner and kernels take.

Source: ExecuTorch 1.5, ``backends/xnnpack/partition/config``; each row was run in its runtime.

1. Activations are signed 8-bit with any zero point; weights signed 8-bit, symmetric, without -128,
   one scale per output channel or one in all. Biases stay float: XNNPACK rounds them itself.
2. Linear layers and two-dimensional convolutions that are not depthwise also run dynamically; then the
   weight has one scale per channel.
3. A transposed convolution has its channels on axis 1 of the weight; with groups, one scale in all.
   Means are over the last two axes of an image, adaptive averages of all of it.
4. What only moves or cuts values keeps its input's qparams.
5. A static linear layer gives integers; a dynamic one reads floats and gives floats, as fast and more
   exactly. So by default what stands between float operators (attention, layer norm, GELU) is dynamic:
   of a trained sentence encoder 27 dB in place of 6.
6. Additions, products, concatenations and what only moves values are quantized between quantized
   operators only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    KnownSlower,
    LeaveFloat,
    QDQRules,
    QuantDefault,
    Tolerance,
)
from backquant.backends.defaults import AT_EACH_CALL, FLOAT32, SIGNED_DEFAULTS
from backquant.dtypes.table import INT4
from backquant.graph.grouped import grouped_linear
from backquant.operators import conv, elementwise, grouped, linear, shape, spellings
from backquant.operators.entry import admit

ACTIVATION = DTypeWithConstraints(torch.qint8)


def _weight(**more: Any) -> DTypeWithConstraints:
    return DTypeWithConstraints(
        torch.qint8,
        quant_min_lower_bound=-127,
        quant_max_upper_bound=127,
        symmetric=True,
        **more,
    )


PLAIN = DTypeConfig(ACTIVATION, ACTIVATION, tolerance=FLOAT32)
WEIGHTED = DTypeConfig(ACTIVATION, ACTIVATION, _weight(ch_axis=0), torch.float, tolerance=FLOAT32)
WEIGHTED_TRANSPOSED = DTypeConfig(
    ACTIVATION,
    ACTIVATION,
    _weight(ch_axis=1),
    torch.float,
    where={"groups": 1},
    tolerance=FLOAT32,
)
WEIGHTED_GROUPED = DTypeConfig(
    ACTIVATION, ACTIVATION, _weight(granularity="per_tensor"), torch.float, tolerance=FLOAT32
)
TRANSPOSED_WEIGHTS = [WEIGHTED_TRANSPOSED, WEIGHTED_GROUPED]
MEAN = DTypeConfig(
    ACTIVATION,
    ACTIVATION,
    where={"dim": {"one_of": [(-2, -1), (2, 3)]}},
    tolerance=FLOAT32,
)
# of the whole image: other windows are averages, which run in float
WHOLE_MEAN = DTypeConfig(
    ACTIVATION, ACTIVATION, where={"output_size": {"one_of": [1, (1, 1)]}}, tolerance=FLOAT32
)
# Of a batch XNNPACK measures each row of a linear layer and each image of a convolution by itself.
BY_ROW = Tolerance(1, "the kernel measures each row by itself at each call")
BY_IMAGE = Tolerance(1, "the kernel measures each image of a batch by itself at each call")
DYNAMIC = DTypeConfig(
    torch.qint8,
    torch.float,
    _weight(ch_axis=0, granularity="per_channel"),
    torch.float,
    is_dynamic=True,
    tolerance=BY_ROW,
)

# 8da4w: each row of the activations is quantized at each call, groups of a row of the weight share a scale
GROUPS = DTypeConfig(
    DTypeWithConstraints(torch.qint8, granularity="per_token"),
    torch.float,
    DTypeWithConstraints(INT4, symmetric=True, granularity="per_group"),
    torch.float,
    is_dynamic=True,
    where={"group_size": {"multiple_of": 32}},
    tolerance=AT_EACH_CALL,
)

# depthwise: every channel a group
NOT_DEPTHWISE = {"groups": {"not": {"equals": "in_channels"}}}
DYNAMIC_CONV = DTypeConfig(
    torch.qint8,
    torch.float,
    _weight(ch_axis=0, granularity="per_channel"),
    torch.float,
    is_dynamic=True,
    where=NOT_DEPTHWISE,
    tolerance=BY_IMAGE,
)

_AT_EACH_CALL = QuantDefault(
    "placeholder", dtype=torch.qint8, quant_min=-128, quant_max=127, is_dynamic=True
)
DEFAULTS = replace(
    SIGNED_DEFAULTS,
    overrides=(
        *SIGNED_DEFAULTS.overrides,
        DefaultOverride(
            (nn.Linear, F.linear), activation=_AT_EACH_CALL, between_float_operators=True
        ),
        # what takes one result of those of all groups is float
        DefaultOverride((grouped_linear,), activation=_AT_EACH_CALL),
    ),
)

# a ReLU becomes part of an addition; before one the delegate computes differences and products in float
ADDITIONS = elementwise.ADD_SUB_MUL[:2]
OTHERS = elementwise.ADD_SUB_MUL[2:]
SHARING: tuple[Any, ...] = (
    *spellings("relu", "relu6", "hardtanh", "clamp"),
    *spellings("max_pool2d"),
    *spellings("flatten", "identity", "permute", "reshape", "squeeze", "transpose", "unsqueeze"),
    *spellings("contiguous", "view"),
)
MEANS: tuple[Any, ...] = spellings("mean")
WHOLE_MEANS: tuple[Any, ...] = spellings("adaptive_avg_pool2d")
RULES = QDQRules(
    dequantize_per_user=True,
    quantize_constants=False,
    leave_float=(
        LeaveFloat(
            (*elementwise.ADD_SUB_MUL, *shape.CAT, *SHARING, *MEANS, *WHOLE_MEANS),
            unless_between_quantized=True,
        ),
    ),
)


# The delegate has depthwise kernels of up to 25 taps; in float, larger ones are a sum of such. Times: one
# thread of an AMD EPYC (Zen 4), benchmarks/LOG.md.
SLOWER = (
    KnownSlower(
        ("conv2d",),
        {
            "all": [{"groups": {"min": 2}}, {"groups": {"equals": "in_channels"}}],
            "product(kernel_size)": {"min": 26},
        },
        measured="ExecuTorch 1.5, depthwise, 7 × 7, 96 channels of 28 × 28",
        integer_us=2440.0,
        float_us=380.0,
    ),
)


def backend_config() -> BackendConfig:
    """What ExecuTorch's XNNPACK delegate runs on integers.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('xnnpack', None, 125)
    """
    return (
        BackendConfig("xnnpack")
        .set_defaults(DEFAULTS)
        .set_qdq(RULES)
        .set_slower(SLOWER)
        .set_backend_pattern_configs(
            [
                *admit(conv.conv_entries(conv.CONV[1]), [WEIGHTED]),
                *admit(conv.conv_entries(conv.CONV[2]), [WEIGHTED, DYNAMIC_CONV]),
                *admit(conv.conv_entries(conv.CONV[3]), [WEIGHTED]),
                *admit(conv.transposed_entries(conv.TRANSPOSED[1]), TRANSPOSED_WEIGHTS),
                *admit(conv.transposed_entries(conv.TRANSPOSED[2]), TRANSPOSED_WEIGHTS),
                *linear.entries([WEIGHTED, DYNAMIC, GROUPS]),
                *grouped.entries([DYNAMIC]),
                *elementwise.binary_entries([PLAIN], ADDITIONS),
                *admit([elementwise.by_tensor_arguments(each) for each in OTHERS], [PLAIN]),
                *shape.cat_entries([PLAIN], shape.CAT),
                *shape.sharing_entries([PLAIN], SHARING),
                *shape.sharing_entries([MEAN], MEANS),
                *shape.sharing_entries([WHOLE_MEAN], WHOLE_MEANS),
            ]
        )
    )
