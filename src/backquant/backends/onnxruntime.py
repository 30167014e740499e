"""onnxruntime: ONNX Runtime's CPU provider, by way of an ONNX file with QuantizeLinear nodes.

Its integer kernels take unsigned activations and signed weights, and need the output quantized, too.
The reference model is what `backquant.export(quantized, "model.onnx")` writes. In float stay transposed
convolutions, GELU, LayerNorm, SiLU, HardSwish and embeddings, for which it has no integer kernels. Of
recurrent layers it has one for `nn.LSTM`, none for `nn.GRU`, `nn.RNN` and cells.

Measured on ONNX Runtime 1.31: with signed activations half of the convolutions and all additions stay
float; with unsigned weights the kernels are slower than float. An addition in integers between float
neighbours costs more than it saves, and the residual additions of transformers cost accuracy (19 dB on
a ViT): they are quantized only between quantized operators.
"""

from __future__ import annotations

import torch
from torch import nn

from backquant.backend_config import BackendConfig, DTypeConfig, KnownSlower, LeaveFloat, QDQRules
from backquant.backends.defaults import AT_EACH_CALL, STEP_BY_STEP
from backquant.backends.deployed import (
    ADDITIONS,
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
    WEIGHT_ONLY,
    in_groups,
    tables_in_groups,
)
from backquant.dtypes.table import INT4, UINT4
from backquant.operators import (
    clamped,
    conv,
    elementwise,
    embedding,
    fixed_qparams,
    grouped,
    linear,
    recurrent,
    shape,
)
from backquant.operators.entry import admit, observed

# DynamicQuantizeLinear and MatMulInteger: unsigned activations, one scale for each call
DYNAMIC = DTypeConfig(
    torch.quint8, torch.float, WEIGHT, torch.float, is_dynamic=True, tolerance=AT_EACH_CALL
)
# DynamicQuantizeLSTM, which quantizes the hidden state at each step
RECURRENT = DTypeConfig(
    torch.quint8,
    torch.float,
    WEIGHT,
    torch.float,
    is_dynamic=True,
    where={"proj_size": 0},
    tolerance=STEP_BY_STEP,
)
# MatMulNBits and GatherBlockQuantized, activations in float32
SIZES = {"group_size": [16, 32, 64, 128, 256]}
GROUPS = [
    in_groups(INT4, where=SIZES),
    in_groups(UINT4, affine=True, where=SIZES),
]
TABLES = [tables_in_groups(INT4, where=SIZES)]
FIXED = (nn.Sigmoid, torch.sigmoid, "sigmoid", *SOFTMAX)
BETWEEN = (*ADDITIONS, *PRODUCTS, *FIXED, nn.LeakyReLU, *shape.CAT, *POOLS, *MOVES)


# DynamicQuantizeLSTM quantizes the hidden state at each step; from 64 values on it is faster. Times: one
# thread of an AMD EPYC (Zen 4), benchmarks/LOG.md.
SLOWER = (
    KnownSlower(
        ("lstm",),
        {"hidden_size": {"max": 63}},
        measured="ONNX Runtime 1.31, 32 values, 20 steps",
        integer_us=20.0,
        float_us=18.0,
    ),
)


def backend_config() -> BackendConfig:
    """What ONNX Runtime computes on integers.

    >>> config = backend_config()
    >>> config.name, config.engine
    ('onnxruntime', None)
    """
    fixed = [e for e in fixed_qparams.entries([VALUES]) if e.pattern in FIXED]
    in_unit = fixed_qparams.constrain(VALUES, fixed_qparams.ZERO_TO_ONE)
    return (
        BackendConfig("onnxruntime")
        .set_defaults(DEPLOYED_DEFAULTS)
        .set_qdq(
            QDQRules(
                bias="int32",
                additions="sum",
                attention="products",
                columns="lines",
                leave_float=(
                    LeaveFloat(FLOAT_OUTPUTS, results=True),
                    LeaveFloat(BETWEEN, unless_between_quantized=True),
                    SCORES,
                ),
            )
        )
        .set_slower(SLOWER)
        .set_backend_pattern_configs(
            [
                *(e for d in (1, 2, 3) for e in admit(conv.conv_entries(conv.CONV[d]), [STATIC])),
                *linear.entries([STATIC, DYNAMIC, WEIGHT_ONLY, *GROUPS]),
                *grouped.entries([STATIC]),
                *recurrent.entries([RECURRENT], (nn.LSTM,)),
                *embedding.table_entries(TABLES),
                *clamped.entries([STATIC], [DYNAMIC, WEIGHT_ONLY, *GROUPS]),
                *elementwise.binary_entries([VALUES], (*ADDITIONS, *PRODUCTS)),
                *admit([observed(product) for product in MATMULS], [VALUES]),
                *shape.cat_entries([VALUES], shape.CAT),
                *fixed,
                *admit([observed(softmax) for softmax in SOFTMAX[1:]], [in_unit]),
                *admit([observed(nn.LeakyReLU)], [VALUES]),
                *shape.sharing_entries([VALUES], (*POOLS, *MOVES)),
                *shape.tensor_info_entries([VALUES]),
            ]
        )
    )
