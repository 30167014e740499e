"""native: what PyTorch's quantized CPU operators run, whichever engine multiplies the matrices.

It is the union of what fbgemm and qnnpack take with unsigned activations, plus layer norm, which
needs no engine. Models are lowered with FBGEMM, whose entries are the same; the range of
activations is reduced accordingly.
"""

from __future__ import annotations

from typing import Any

from backquant.backend_config import BackendConfig
from backquant.backends.defaults import (
    DYNAMIC_FLOAT16,
    DYNAMIC_INT8,
    FBGEMM_DEFAULTS,
    FBGEMM_TRANSPOSED,
    FLOAT_WEIGHT_QUINT8,
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
    """What PyTorch's own quantized operators can run.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('native', 'fbgemm', 192)
    """
    return (
        BackendConfig("native")
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
                *norm.layer_norm_entries([FLOAT_WEIGHT_QUINT8]),
                *recurrent.entries([RECURRENT_INT8, RECURRENT_FLOAT16]),
                *embedding.entries([WEIGHT_ONLY_QUINT8, WEIGHT_ONLY_QUINT4X2]),
            ]
        )
    )


get_native_backend_config = backend_config


def get_native_backend_config_dict() -> dict[str, Any]:
    """The same as a dict.

    >>> get_native_backend_config_dict()["name"]
    'native'
    """
    return backend_config().to_dict()
