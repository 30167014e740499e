"""What TensorRT computes at the end of the kernels of convolutions and matrix products, in any precision."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["EPILOGUES"]

# a pair between a convolution and one of these would keep TensorRT from computing both in one kernel
EPILOGUES: tuple[Any, ...] = (
    operator.add,
    torch.add,
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.LeakyReLU,
    F.relu,
    F.relu6,
    F.hardtanh,
    F.leaky_relu,
    torch.relu,
    "relu",
    torch.ops.aten.add.Tensor,
    torch.ops.aten.relu.default,
    torch.ops.aten.relu6.default,
    torch.ops.aten.hardtanh.default,
    torch.ops.aten.leaky_relu.default,
)
