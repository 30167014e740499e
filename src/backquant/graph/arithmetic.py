"""The spellings of arithmetic in captured graphs."""

from __future__ import annotations

import operator

import torch

__all__ = ["DIFFERENCES", "PRODUCTS", "QUOTIENTS", "SUMS"]

_aten = torch.ops.aten
SUMS = frozenset({operator.add, torch.add, "add", _aten.add.Tensor})
DIFFERENCES = frozenset({operator.sub, torch.sub, "sub", _aten.sub.Tensor})
PRODUCTS = frozenset({operator.mul, torch.mul, "mul", _aten.mul.Tensor})
QUOTIENTS = frozenset({operator.truediv, torch.div, "div", _aten.div.Tensor})
