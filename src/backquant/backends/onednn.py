"""onednn: oneDNN's int8 kernels for x86 CPUs, with more fusions than the other engines.

Activations are unsigned 8-bit in full range, so a CPU with VNNI is wanted; weights signed 8-bit
per output channel. Beyond the others it runs convolution + add (+ ReLU), linear + LeakyReLU and
linear + Tanh as one kernel, and layer norm.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig
from backquant.backends.defaults import (
    DYNAMIC_INT8,
    FBGEMM_TRANSPOSED,
    FLOAT_WEIGHT_QUINT8,
    ONEDNN_DEFAULTS,
    QUINT8,
    RECURRENT_INT8,
    WEIGHT_ONLY_QUINT4X2,
    WEIGHT_ONLY_QUINT8,
    WEIGHTED_QUINT8,
)
from backquant.operators import (
    conv,
    conv_add,
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

LINEAR = [WEIGHTED_QUINT8, DYNAMIC_INT8]


def backend_config() -> BackendConfig:
    """What oneDNN can run.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('onednn', 'onednn', 220)
    """
    return (
        BackendConfig("onednn")
        .set_engine("onednn")
        .set_defaults(ONEDNN_DEFAULTS)
        .set_backend_pattern_configs(
            [
                *conv.entries([WEIGHTED_QUINT8], FBGEMM_TRANSPOSED),
                *conv_add.entries([WEIGHTED_QUINT8]),
                *linear.entries(LINEAR),
                *grouped.entries([WEIGHTED_QUINT8, DYNAMIC_INT8]),
                *linear.leaky_relu_entries(LINEAR),
                *linear.tanh_entries(LINEAR),
                *elementwise.binary_entries([QUINT8]),
                *elementwise.matmul_entries([QUINT8]),
                *shape.cat_entries([QUINT8]),
                *catalog.observed_entries([QUINT8]),
                *fixed_qparams.entries([QUINT8]),
                *catalog.sharing_qparams_entries([QUINT8]),
                *norm.batch_norm_entries([QUINT8]),
                *norm.layer_norm_entries([FLOAT_WEIGHT_QUINT8]),
                *recurrent.entries([RECURRENT_INT8]),
                *embedding.entries([WEIGHT_ONLY_QUINT8, WEIGHT_ONLY_QUINT4X2]),
            ]
        )
    )


get_onednn_backend_config = backend_config
