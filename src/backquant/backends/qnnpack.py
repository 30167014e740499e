"""qnnpack: PyTorch's mobile int8 kernels (QNNPACK, and XNNPACK for signed activations).

Two static forms, preferred in this order:

1. signed: activations and weights ``qint8``, weights within [-127, 127], scales of at least
   2**-12 (below, XNNPACK's requantization loses its precision);
2. unsigned: activations ``quint8``, weights ``qint8``.

In both the bias is rounded to whole products: where one step of the input by one of the weight is beyond a
step of the result, a layer with a bias stays float.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.backends.defaults import (
    DYNAMIC_INT8,
    QNNPACK_DEFAULTS,
    QUINT8,
    RECURRENT_INT8,
    SYMMETRIC_QINT8,
    WEIGHT_ONLY_QUINT4X2,
    WEIGHT_ONLY_QUINT8,
    WEIGHTED_QUINT8,
    WEIGHTED_SYMMETRIC_QINT8,
)
from backquant.operators import (
    conv,
    elementwise,
    embedding,
    fixed_qparams,
    linear,
    norm,
    recurrent,
    shape,
)
from backquant.operators import equivalents as catalog

# Biases are integers of one step of the input by one of the weight.
WEIGHTED = [
    DTypeConfig.from_dict({**config.to_dict(), "bias_step_upper_bound": 1})
    for config in (WEIGHTED_SYMMETRIC_QINT8, WEIGHTED_QUINT8)
]
PLAIN = [SYMMETRIC_QINT8, QUINT8]

# its transposed kernel gives wrong numbers in three dimensions
TRANSPOSED = {1: None, 2: None}


def backend_config() -> BackendConfig:
    """What QNNPACK and XNNPACK can run.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('qnnpack', 'qnnpack', 185)
    """
    return (
        BackendConfig("qnnpack")
        .set_engine("qnnpack")
        .set_defaults(QNNPACK_DEFAULTS)
        .set_backend_pattern_configs(
            [
                *conv.entries(WEIGHTED, TRANSPOSED),
                *linear.entries([*WEIGHTED, DYNAMIC_INT8]),
                *elementwise.binary_entries(PLAIN),
                *elementwise.matmul_entries(PLAIN),
                *shape.cat_entries(PLAIN),
                *catalog.observed_entries(PLAIN),
                *fixed_qparams.entries(PLAIN),
                *catalog.sharing_qparams_entries(PLAIN),
                *norm.batch_norm_entries(PLAIN),
                *recurrent.entries([RECURRENT_INT8]),
                *embedding.entries([WEIGHT_ONLY_QUINT8, WEIGHT_ONLY_QUINT4X2]),
            ]
        )
    )


get_qnnpack_backend_config = backend_config
