"""tensorrt_fp8: NVIDIA TensorRT's FP8 (E4M3) for activations and weights.

Values are divided by a scale of their own, largest magnitude / 448, and rounded to 8-bit floats; the zero
point is 0. One scale for each tensor. Operators are those of `tensorrt`; no engine of PyTorch runs it: the
result is the reference model, which computes in float on the rounded values, and the file that
`backquant.export(quantized, "model.onnx", to="tensorrt")` writes (operator set 19).
Source: TensorRT documentation, "Quantization schemes"; arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from backquant.backend_config import (
    BackendConfig,
    BackendDefaults,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    QDQRules,
    QuantDefault,
)
from backquant.backends.deployed import EPILOGUES
from backquant.nn import intrinsic
from backquant.operators import conv, elementwise, linear, shape
from backquant.operators import equivalents as catalog

FP8 = DTypeWithConstraints(torch.float8_e4m3fn, symmetric=True, granularity="per_tensor")
WEIGHTED_FP8 = DTypeConfig(FP8, FP8, FP8, torch.float)
PLAIN_FP8 = DTypeConfig(FP8, FP8)

# ±448 are the bounds of E4M3, so that the scale is the largest magnitude / 448
LARGEST = QuantDefault(
    "minmax",
    dtype=torch.float8_e4m3fn,
    qscheme=torch.per_tensor_symmetric,
    quant_min=-448,
    quant_max=448,
)
_UNFOLDED = {intrinsic.LinearBn1d} | {
    kind for c in conv.CONV.values() for kind in (c.bn, c.bn_relu)
}


def backend_config() -> BackendConfig:
    """What TensorRT takes as FP8 layers.

    >>> config = backend_config()
    >>> config.name, config.engine
    ('tensorrt_fp8', None)
    """
    return (
        BackendConfig("tensorrt_fp8")
        .set_defaults(BackendDefaults(activation=LARGEST, weight=LARGEST))
        .set_qdq(QDQRules(epilogues=EPILOGUES))
        .set_backend_pattern_configs(
            [
                *_of_inference(conv.entries([WEIGHTED_FP8])),
                *linear.addmm_entries([WEIGHTED_FP8]),
                *shape.cat_entries([PLAIN_FP8]),
                *_of_inference(linear.entries([WEIGHTED_FP8])),
                *elementwise.binary_entries([PLAIN_FP8]),
                *elementwise.matmul_entries([PLAIN_FP8]),
                *catalog.sharing_qparams_entries([PLAIN_FP8]),
                *shape.tensor_info_entries([PLAIN_FP8]),
            ]
        )
    )


def _of_inference(entries: Iterable[BackendPatternConfig]) -> Iterator[BackendPatternConfig]:
    """Those for modules that exist outside of training, which FP8 has none of: fake quantization rounds to
    integers, and a batch norm that is not folded is there in training alone."""
    listed = list(entries)
    trained = {entry.qat_module for entry in listed} - {None} | _UNFOLDED
    for entry in listed:
        if not isinstance(entry.pattern, type) or entry.pattern not in trained:
            yield entry.set_qat_module(None)
