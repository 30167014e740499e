"""openvino: OpenVINO's CPU plugin, by way of an ONNX file or its own IR with FakeQuantize semantics.

It runs the same form as ONNX Runtime: unsigned activations, signed weights folded to integers. Values
that depend on no input are not quantized: an addition of a quantized constant fails to compile. In float
(bfloat16 where the CPU has it) stay softmax, sigmoid, norms and embeddings.

Measured on OpenVINO 2026.4: float weights behind quantize nodes make the convolutions run in bfloat16;
unsigned weights, too. Transposed convolutions have integer kernels for inputs without a zero point and
weights scaled by output channel, where they are not grouped, no stride is larger than the kernel, padding
does not reach beyond it, and their last stride is at most 2 (with 3, values at the end are memory that
nobody wrote).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.backend_config import (
    BackendConfig,
    DefaultOverride,
    DTypeConfig,
    DTypeWithConstraints,
    LeaveFloat,
    QDQRules,
    QuantDefault,
)
from backquant.backends.defaults import (
    BFLOAT16,
    CONVOLUTIONS,
    FLOAT32,
    QAT_CHANNEL_WEIGHT,
    TRANSPOSED,
)
from backquant.backends.deployed import (
    ADDITIONS,
    AVERAGES,
    DEPLOYED_DEFAULTS,
    FLOAT_OUTPUTS,
    MATMULS,
    MOVES,
    POOLS,
    PRODUCTS,
    SCORES,
    SOFTMAX,
    STATIC,
    VALUES,
    WEIGHT,
    in_groups,
    tables_in_groups,
    that_end,
)
from backquant.dtypes.table import INT4, UINT4
from backquant.operators import clamped, conv, elementwise, embedding, grouped, linear, shape
from backquant.operators.entry import admit, observed

BETWEEN = (*ADDITIONS, *PRODUCTS, *shape.CAT, *POOLS, *MOVES)

# OpenVINO computes attention in one kernel. It takes signed queries and keys, and saves 2 % of a BERT or
# ViT so; unsigned ones it computes in float between conversions. Its second product, and one whose scores
# a bias is added to (a Swin), are faster in float.
SIGNED = DTypeConfig(
    DTypeWithConstraints(torch.qint8, symmetric=True),
    DTypeWithConstraints(torch.qint8, symmetric=True),
    tolerance=FLOAT32,
)
SYMMETRIC = QuantDefault("histogram", dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
PRODUCT = DefaultOverride(MATMULS, activation=SYMMETRIC)
# Transposed convolutions take integers without a zero point, and weights scaled by output channel.
DECONVOLUTION = DTypeConfig(
    DTypeWithConstraints(torch.qint8, symmetric=True),
    DTypeWithConstraints(torch.qint8, symmetric=True),
    DTypeWithConstraints(torch.qint8, symmetric=True, ch_axis=1),
    torch.float,
    where={
        "all": [
            {"groups": 1, "stride[-1]": {"max": 2}},
            # OpenVINO's canBeExecutedInInt8: no axis on which places of the result lie between the taps
            {"stride": {"max": "kernel_size"}},
            # padding that crops what taps reach: wrong by 5 to 94 steps (2026.4)
            {"padding": {"max": "dilation * (kernel_size - 1)"}},
            # without AMX the integer kernel is wrong for the others (2026.4): some 20 steps, memory that
            # nobody wrote
            {"any": [{"dilation": 1}, {"stride": 1}]},
            {"any": [{"output_padding": 0}, {"padding": {"min": 1}}]},
        ]
    },
    tolerance=FLOAT32,
)
BY_OUTPUT_CHANNEL = DefaultOverride(
    TRANSPOSED,
    activation=SYMMETRIC,
    weight=replace(DEPLOYED_DEFAULTS.weight, ch_axis=1),
    qat_weight=replace(QAT_CHANNEL_WEIGHT, ch_axis=1),
)
# An average over integers takes padding as the integer 0, whatever number the zero point makes of that.
UNPADDED = DTypeConfig(
    torch.quint8,
    torch.quint8,
    where={"any": [{"padding": 0}, {"count_include_pad": False}]},
    tolerance=FLOAT32,
)
# weights alone: activations are rounded to bfloat16 where the CPU computes in it
ROUNDED_WEIGHT_ONLY = DTypeConfig(torch.float, torch.float, WEIGHT, torch.float, tolerance=BFLOAT16)
# compressed fully connected layers and gathers
SIZES = {"group_size": {"min": 16, "multiple_of": 16}}
GROUPS = [
    in_groups(INT4, where=SIZES, tolerance=BFLOAT16),
    in_groups(UINT4, affine=True, where=SIZES, tolerance=BFLOAT16),
]
TABLES = [tables_in_groups(INT4, where=SIZES)]
DEFAULTS = replace(
    DEPLOYED_DEFAULTS,
    overrides=(*DEPLOYED_DEFAULTS.overrides, PRODUCT, BY_OUTPUT_CHANNEL),
    leave_float=(LeaveFloat(MATMULS, after=SOFTMAX, before=ADDITIONS),),
)


def backend_config() -> BackendConfig:
    """What OpenVINO's CPU plugin computes on integers.

    >>> config = backend_config()
    >>> config.name, config.qdq.quantize_constants
    ('openvino', False)
    """
    rules = QDQRules(
        quantize_constants=False,
        attention="products",
        columns="lines",
        leave_float=(
            LeaveFloat((*FLOAT_OUTPUTS, *CONVOLUTIONS, *TRANSPOSED), results=True),
            LeaveFloat(BETWEEN, unless_between_quantized=True),
            SCORES,
        ),
    )
    return (
        BackendConfig("openvino")
        .set_defaults(DEFAULTS)
        .set_qdq(rules)
        .set_backend_pattern_configs(
            [
                *that_end(
                    e for d in (1, 2, 3) for e in admit(conv.conv_entries(conv.CONV[d]), [STATIC])
                ),
                *(
                    entry
                    for kind in conv.TRANSPOSED.values()
                    for entry in admit(conv.transposed_entries(kind), [DECONVOLUTION])
                ),
                *linear.entries([STATIC, ROUNDED_WEIGHT_ONLY, *GROUPS]),
                *grouped.entries([STATIC]),
                *embedding.table_entries(TABLES),
                *that_end(clamped.entries([STATIC], [ROUNDED_WEIGHT_ONLY, *GROUPS])),
                *elementwise.binary_entries([VALUES], (*ADDITIONS, *PRODUCTS)),
                *admit([observed(product) for product in MATMULS], [SIGNED]),
                *shape.cat_entries([VALUES], shape.CAT),
                *shape.sharing_entries([VALUES], [p for p in POOLS if p not in AVERAGES]),
                *shape.sharing_entries([UNPADDED], AVERAGES),
                *shape.sharing_entries([VALUES], MOVES),
                *shape.tensor_info_entries([VALUES]),
            ]
        )
    )
