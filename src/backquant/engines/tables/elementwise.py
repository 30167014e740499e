"""Addition and multiplication of two integer tensors, with a ReLU behind or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from backquant.engines.tables.arguments import FAR_APART, bind, refuse_far_apart
from backquant.engines.tables.spellings import RELUS
from backquant.lower.kernels import elementwise
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

ADDS: tuple[Any, ...] = spellings("add")
MULS: tuple[Any, ...] = spellings("mul")


def binary_rules() -> list[LowerRule]:
    """Rules for ``x + y`` and ``x * y``.

    >>> [rule.name for rule in binary_rules()]
    ['add + relu', 'add', 'mul + relu', 'mul']
    """
    return [
        LowerRule("add + relu", (ADDS, RELUS), _build(elementwise.add_relu)),
        LowerRule("add", (ADDS,), _build(elementwise.add)),
        LowerRule("mul + relu", (MULS, RELUS), _build(elementwise.mul_relu)),
        LowerRule("mul", (MULS,), _build(elementwise.mul)),
    ]


_PRODUCTS = (elementwise.mul, elementwise.mul_relu)
_FAR = 2.0**15  # times 255 by 255 steps: the end of 32 bits


def _build(kernel: Callable[..., torch.Tensor]) -> Callable[[Site], Emit | Reason]:
    def build(site: Site) -> Emit | Reason:
        found = bind(site.node, ("input", "other", "alpha"), {"alpha": 1})
        if found is None or found["alpha"] != 1:
            return site.refuse(ReasonCode.ARGUMENTS, "alpha or out", "x + y, without alpha")
        pair = [found["input"], found["other"]]
        if not all(isinstance(node, Node) for node in pair):
            return site.refuse(ReasonCode.ONE_TENSOR, "a tensor and a number", "two tensors")
        x, y = (operand(node) for node in pair)
        if x.qparams is None or y.qparams is None:
            return site.refuse(
                ReasonCode.FLOAT_INPUT, "an input computed in float", "two integer inputs"
            )
        if site.out is None:
            return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
        if not x.qparams.dtype == y.qparams.dtype == site.out.dtype:
            asked = f"{x.qparams.dtype}, {y.qparams.dtype} to {site.out.dtype}"
            return site.refuse(
                ReasonCode.MIXED_DTYPES, asked, "one dtype for both inputs and the result"
            )
        if kernel in _PRODUCTS and x.qparams.scale * y.qparams.scale >= _FAR * site.out.scale:
            return site.refuse(
                ReasonCode.KERNEL_DEFECT,
                "a product of one step by one step beyond 2**15 steps of the result",
                "scales of one magnitude: further out the kernel's integers overflow",
            )
        if max(x.qparams.scale, y.qparams.scale) >= FAR_APART * site.out.scale:
            return refuse_far_apart(site)
        args = (x.node, *x.qparams.args, y.node, *y.qparams.args, *site.out.args)
        return Emit(kernel, args, f"quantized.{kernel.__name__}", site.out)

    return build
