"""What ``quantize`` leaves in float by default: in networks with layer norms, what lies between their
weighted layers.

There a value is normalised, added and reshaped between two linear layers, and each of these operators
would round it once more. On the engines of oneDNN a linear layer gives floats as fast as integers, so
that float operators cost what their memory traffic costs: less than requantizing. Linear layers,
convolutions and the activation functions behind them are quantized as ever.

``get_default_qconfig_mapping`` stays PyTorch's; this is the choice of ``quantize`` and ``explain``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower import EngineInfo
from backquant.qconfig import QConfigMapping

__all__ = ["BETWEEN", "with_float_islands"]

_ENGINES = ("x86", "onednn")
_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)

BETWEEN: tuple[Any, ...] = (
    # arithmetic
    torch.add, operator.add, operator.iadd, "add", "add_", torch.sub, operator.sub, "sub", "sub_",
    torch.mul, operator.mul, operator.imul, "mul", "mul_", torch.matmul, operator.matmul, "matmul",
    torch.bmm, "bmm", torch.mean, "mean",
    # norms and softmax
    nn.LayerNorm, F.layer_norm, nn.Softmax, F.softmax, torch.softmax, "softmax",
    # moving values
    torch.cat, torch.stack, torch.flatten, torch.narrow, torch.repeat_interleave, torch.transpose,
    torch.squeeze, torch.unsqueeze, torch.permute, torch.roll, torch.chunk, torch.split,
    "contiguous", "permute", "repeat", "repeat_interleave", "reshape", "squeeze", "transpose",
    "unsqueeze", "view", "flatten", "chunk", "split",
)  # fmt: skip


def with_float_islands(
    mapping: QConfigMapping, model: nn.Module, engine: EngineInfo | None
) -> tuple[QConfigMapping, tuple[str, ...]]:
    """``mapping``, for a model with layer norms on oneDNN changed so that the operators ``BETWEEN`` stay
    in float, with a note that says so.

    >>> from backquant.lower import engine_info
    >>> engine = engine_info("x86")
    >>> changed, notes = with_float_islands(QConfigMapping(), nn.LayerNorm(2), engine)
    >>> changed.object_type_qconfigs["reshape"] is None, len(notes)
    (True, 1)
    >>> with_float_islands(QConfigMapping(), nn.BatchNorm1d(2), engine)[1]
    ()
    """
    if engine is None or engine.name not in _ENGINES or not _normalises(model):
        return mapping, ()
    for spelling in BETWEEN:
        mapping.set_object_type(spelling, None)
    note = (
        "the model has layer norms: sums, products, norms and reshaping between its weighted layers "
        "stay in float (QConfigMapping: object_type None), which costs no time and is more exact; "
        'quantize them with qconfig_mapping=get_default_qconfig_mapping("' + engine.name + '")'
    )
    return mapping, (note,)


def _normalises(model: nn.Module) -> bool:
    return any(isinstance(module, _NORMS) for module in model.modules())
