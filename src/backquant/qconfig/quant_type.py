"""How a module is quantized: dynamic, static, trained, or its weight only."""

from __future__ import annotations

from enum import IntEnum

import torch

from backquant.dtypes import is_quantized
from backquant.errors import ConfigError


class QuantType(IntEnum):
    """Kinds of quantization, numbered as PyTorch numbers them.

    >>> QuantType.STATIC.key
    'static'
    """

    DYNAMIC = 0
    STATIC = 1
    QAT = 2
    WEIGHT_ONLY = 3

    @property
    def key(self) -> str:
        """The name used as a key in dicts."""
        return self.name.lower()


def quant_type_from_str(name: str) -> QuantType:
    """The inverse of ``QuantType.key``; raises ConfigError for an unknown name.

    >>> quant_type_from_str("weight_only")
    <QuantType.WEIGHT_ONLY: 3>
    """
    for quant_type in QuantType:
        if quant_type.key == name:
            return quant_type
    raise ConfigError(
        f"{name!r} is no kind of quantization",
        where="quant_type_from_str",
        fix="use one of " + ", ".join(repr(kind.key) for kind in QuantType),
    )


def quant_type_of(
    activation: torch.dtype, activation_is_dynamic: bool, weight: torch.dtype
) -> QuantType | None:
    """The kind of quantization that a QConfig asks for, from the dtypes of what it makes.

    ``None`` for what PyTorch knows no kind of, such as float32 weights.

    >>> quant_type_of(torch.float32, False, torch.qint8)
    <QuantType.WEIGHT_ONLY: 3>
    """
    if is_quantized(weight):
        if activation_is_dynamic:
            return QuantType.DYNAMIC
        return QuantType.STATIC if is_quantized(activation) else QuantType.WEIGHT_ONLY
    if weight == torch.float16:
        if activation_is_dynamic:
            return QuantType.DYNAMIC
        return QuantType.STATIC if activation == torch.float16 else None
    return None
