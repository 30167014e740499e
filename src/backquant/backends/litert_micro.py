"""litert_micro: what ``litert`` describes, with the arithmetic of LiteRT's reference kernels.

These are the kernels of TensorFlow Lite for Microcontrollers (``tflite-micro``) and of LiteRT without
XNNPACK, which requantizes in float32. The files are the same; the integer reference computes what the file
gives there. Tried against LiteRT 2.3: convolutions, sums and products multiply in 64 bits and round twice,
linear layers once, halves up; averages round halves away from zero. Equal in every bit but for products of
two activations and means, of which up to 2 in 100 values are one step off.
"""

from __future__ import annotations

from backquant.backend_config import BackendConfig, BackendPatternConfig
from backquant.backends import litert

_ONCE = ("linear", "Linear")
_TWICE = ("add", "sub", "mul", "matmul", "bmm")
_AVERAGES = ("avg_pool", "AvgPool1d", "AvgPool2d")


def backend_config() -> BackendConfig:
    """What LiteRT's reference kernels compute on integers.

    >>> config = backend_config()
    >>> config.name, config.configs[0].dtype_configs[0].requantization
    ('litert_micro', 'fixed_point_twice')
    """
    config = litert.backend_config().set_name("litert_micro")
    for entry in config.configs:
        _describe(entry)
    return config


def _describe(entry: BackendPatternConfig) -> None:
    """Say how the results of an entry are rounded, in place: its dtype configs are its own."""
    names = [getattr(node.op, "__name__", str(node.op)) for node in entry.normal_pattern.nodes]
    once, averages = (
        any(part in name for name in names for part in parts) for parts in (_ONCE, _AVERAGES)
    )
    for dtypes in entry.dtype_configs:
        if averages:
            dtypes.rounding = "half_away"
        elif once:
            dtypes.requantization, dtypes.rounding = "fixed_point", "half_up"
        elif dtypes.weight_dtype is not None or set(names) & set(_TWICE):
            dtypes.requantization = "fixed_point_twice"
