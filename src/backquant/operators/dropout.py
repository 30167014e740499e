"""Dropout: the identity for inference, random zeros for training."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from backquant.operators.operator import INPUT, Operator, Sample

OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="dropout",
        family="dropout",
        homogeneous=True,
        sample=Sample(call=(INPUT, 0.5, False)),
        modules=(nn.Dropout,),
        functions=(F.dropout,),
        aten=(torch.ops.aten.dropout.default,),
    ),
)
