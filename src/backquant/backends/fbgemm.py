"""fbgemm: PyTorch's server-side int8 kernels for x86 CPUs.

Activations are unsigned 8-bit with a reduced range of 7 bits (its kernels add pairs of products
in 16 bits), weights signed 8-bit per output channel.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig
from backquant.backends.defaults import (
    DYNAMIC_FLOAT16,
    DYNAMIC_INT8,
    FBGEMM_DEFAULTS,
    FBGEMM_TRANSPOSED,
    QUINT8,
    RECURRENT_FLOAT16,
    RECURRENT_INT8,
    WEIGHT_ONLY_QUINT4X2,
    WEIGHT_ONLY_QUINT8,
    WEIGHTED_QUINT8,
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

DYNAMIC = [DYNAMIC_INT8, DYNAMIC_FLOAT16]


def backend_config() -> BackendConfig:
    """What FBGEMM can run.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('fbgemm', 'fbgemm', 190)
    """
    return (
        BackendConfig("fbgemm")
        .set_engine("fbgemm")
        .set_defaults(FBGEMM_DEFAULTS)
        .set_backend_pattern_configs(
            [
                *conv.entries([WEIGHTED_QUINT8], FBGEMM_TRANSPOSED),
                *linear.entries([WEIGHTED_QUINT8, *DYNAMIC]),
                *elementwise.binary_entries([QUINT8]),
                *elementwise.matmul_entries([QUINT8]),
                *shape.cat_entries([QUINT8]),
                *catalog.observed_entries([QUINT8]),
                *fixed_qparams.entries([QUINT8]),
                *catalog.sharing_qparams_entries([QUINT8]),
                *shape.tensor_info_entries([QUINT8]),
                *norm.batch_norm_entries([QUINT8]),
                *recurrent.entries([RECURRENT_INT8, RECURRENT_FLOAT16]),
                *embedding.entries([WEIGHT_ONLY_QUINT8, WEIGHT_ONLY_QUINT4X2]),
            ]
        )
    )


get_fbgemm_backend_config = backend_config
