"""Dtype configs that several of PyTorch's engines admit, by the kind of operator.

Static: activations and weights are quantized ahead. Dynamic: the activation is quantized at each
call. Weight only: activations stay float.
"""

from __future__ import annotations

from typing import Any

import torch

from backquant.backend_config import DTypeConfig, DTypeWithConstraints, Tolerance

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
