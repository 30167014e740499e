"""tensorrt: NVIDIA TensorRT's int8 (signed activations and weights).

TensorRT quantizes symmetrically: the zero point is 0, for weights per output channel. No engine
of PyTorch runs it; the result is the reference model, whose quantize/dequantize pairs TensorRT
reads (developer guide, "Working with Quantized Types").
"""

from __future__ import annotations

from typing import Any

import torch

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints, QDQRules
from backquant.backends.defaults import FLOAT32, TENSORRT_DEFAULTS
from backquant.backends.deployed import EPILOGUES
from backquant.operators import conv, elementwise, linear, shape
from backquant.operators import equivalents as catalog

SYMMETRIC = DTypeWithConstraints(torch.qint8, symmetric=True)
WEIGHTED_QINT8 = DTypeConfig(SYMMETRIC, SYMMETRIC, SYMMETRIC, torch.float, tolerance=FLOAT32)
QINT8 = DTypeConfig(SYMMETRIC, SYMMETRIC, tolerance=FLOAT32)


def backend_config() -> BackendConfig:
    """What TensorRT takes as quantized layers.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('tensorrt', None, 147)
    """
    return (
        BackendConfig("tensorrt")
        .set_defaults(TENSORRT_DEFAULTS)
        .set_qdq(QDQRules(epilogues=EPILOGUES))
        .set_backend_pattern_configs(
            [
                *conv.entries([WEIGHTED_QINT8]),
                *linear.addmm_entries([WEIGHTED_QINT8]),
                *shape.cat_entries([QINT8]),
                *linear.entries([WEIGHTED_QINT8]),
                *elementwise.binary_entries([QINT8]),
                *elementwise.matmul_entries([QINT8]),
                *catalog.sharing_qparams_entries([QINT8]),
                *shape.tensor_info_entries([QINT8]),
            ]
        )
    )


get_tensorrt_backend_config = backend_config


def get_tensorrt_backend_config_dict() -> dict[str, Any]:
    """The same as a dict.

    >>> get_tensorrt_backend_config_dict()["name"]
    'tensorrt'
    """
    return backend_config().to_dict()
