"""litert_16x8: ``.tflite`` files with activations of 16 bits and weights of 8, for LiteRT.

Source: LiteRT 8-bit quantization specification, "16x8", and the kernels of LiteRT 2.3.

1. Activations are int16 around 0; weights as those of ``litert``; biases are int64 in steps of input × weight
   scale.
2. Results of softmax, sigmoid and tanh are in steps of 2**-15.
3. Sums of convolutions become results by a multiplier of 16 bits, of linear layers by one of 32; halves up.
4. The kernels are LiteRT's own: XNNPACK has none, and NPUs and phones run fewer operators so.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backquant.backend_config import BackendConfig, DTypeWithConstraints, QuantDefault
from backquant.backends.litert import DEFAULTS as NARROW
from backquant.backends.litert import Values, described

INT16 = Values(
    DTypeWithConstraints(torch.int16, symmetric=True),
    torch.int64,
    unit=(2.0**-15, 0),
    around_zero=(2.0**-15, 0),
    computed=("leaky_relu", "silu", "hardsigmoid"),
    missing=("pixel_shuffle", "pixel_unshuffle"),
)
_SYMMETRIC = torch.per_tensor_symmetric
DEFAULTS = replace(
    NARROW,
    activation=QuantDefault("histogram", dtype=torch.int16, qscheme=_SYMMETRIC, reduce_range=False),
    qat_activation=QuantDefault(
        "moving_average_minmax",
        dtype=torch.int16,
        qscheme=_SYMMETRIC,
        quant_min=-32768,
        quant_max=32767,
        reduce_range=False,
        fake_quantize="fused_moving_average",
    ),
)


def backend_config() -> BackendConfig:
    """What LiteRT computes on integers of 16 bits.

    >>> config = backend_config()
    >>> config.name, str(config.configs[0].dtype_configs[0].bias_dtype)
    ('litert_16x8', 'torch.int64')
    """
    config = described("litert_16x8", INT16, DEFAULTS)
    for entry in config.configs:
        names = [getattr(node.op, "__name__", "") for node in entry.normal_pattern.nodes]
        linear = any(name in ("linear", "Linear") for name in names)
        for dtypes in entry.dtype_configs:
            if dtypes.weight_dtype is not None:
                dtypes.requantization = "fixed_point" if linear else "fixed_point_16"
                dtypes.rounding = "half_up"
    return config
