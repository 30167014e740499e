"""x86: PyTorch's unified engine for x86 CPUs, which runs oneDNN's and FBGEMM's int8 kernels.

Activations are unsigned 8-bit with a reduced range of 7 bits (without VNNI two products of full
range overflow the 16-bit sum), weights signed 8-bit per output channel.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig
from backquant.backends.defaults import (
    DYNAMIC_FLOAT16,
    DYNAMIC_INT8,
    FBGEMM_TRANSPOSED,
    QUINT8,
    RECURRENT_FLOAT16,
    RECURRENT_INT8,
    WEIGHT_ONLY_QUINT4X2,
    WEIGHT_ONLY_QUINT8,
    WEIGHTED_QUINT8,
    X86_DEFAULTS,
)
from backquant.operators import (
    conv,
    elementwise,
    embedding,
    fixed_qparams,
    grouped,
    linear,
    norm,
    recurrent,
    shape,
)
from backquant.operators import equivalents as catalog

DYNAMIC = [DYNAMIC_INT8, DYNAMIC_FLOAT16]


def backend_config() -> BackendConfig:
    """What the x86 engine can run.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('x86', 'x86', 191)
    """
    return (
        BackendConfig("x86")
        .set_engine("x86")
        .set_defaults(X86_DEFAULTS)
        .set_backend_pattern_configs(
            [
                *conv.entries([WEIGHTED_QUINT8], FBGEMM_TRANSPOSED),
                *linear.entries([WEIGHTED_QUINT8, *DYNAMIC]),
                *grouped.entries([WEIGHTED_QUINT8, DYNAMIC_INT8]),
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


get_x86_backend_config = backend_config
