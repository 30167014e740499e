"""qnnpack_pt2e: QNNPACK described in aten operators, for graphs captured with torch.export.

A linear layer appears as ``addmm`` or ``mm``, a convolution as ``aten.convolution``; the values
of a max pooling are item 0 of a pair. The result is the reference model.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig
from backquant.backends.defaults import QNNPACK_PT2E_DEFAULTS, QUINT8, WEIGHTED_QUINT8
from backquant.operators import conv, elementwise, linear, overload, pooling, shape


def backend_config() -> BackendConfig:
    """What QNNPACK can run, in aten operators.

    >>> config = backend_config()
    >>> config.name, config.engine, len(config.configs)
    ('qnnpack_pytorch_2.0_export', None, 13)
    """
    return (
        BackendConfig("qnnpack_pytorch_2.0_export")
        .set_defaults(QNNPACK_PT2E_DEFAULTS)
        .set_backend_pattern_configs(
            [
                *linear.aten_entries([WEIGHTED_QUINT8]),
                *elementwise.aten_entries([QUINT8]),
                *conv.aten_entries([WEIGHTED_QUINT8]),
                *pooling.aten_entries([QUINT8]),
                *shape.sharing_entries([QUINT8], [overload("relu")]),
            ]
        )
    )


get_qnnpack_pt2e_backend_config = backend_config
