"""Addition and multiplication of two integer tensors, with a ReLU behind or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import (
    FAR_APART,
    bind,
    first_operand,
    refuse_far_apart,
    refuse_float_input,
)
from backquant.engines.tables.spellings import CLAMPS, HARDTANHS, RELU6S, RELUS, post_op_of
from backquant.lower.kernels import elementwise
from backquant.lower.kernels.lookup import clamp
from backquant.lower.qdq import quantized_value
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


# Activation functions that stand alone.
#
# Those that cut values off keep the qparams of the input in the reference model, and run as a clamp of
# integers: quantization is monotone, so clamping before or after it is the same.


def clamp_rules() -> list[LowerRule]:
    """Rules for ReLU, ReLU6, Hardtanh and clamp.

    >>> [rule.name for rule in clamp_rules()]
    ['clamp']
    """
    keys: tuple[Any, ...] = (*RELUS, *RELU6S, *HARDTANHS, *CLAMPS)
    return [LowerRule("clamp", (keys,), _clamp)]


def _clamp(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    post_op = post_op_of(site.steps[0])
    if post_op is None:
        return site.refuse(ReasonCode.ARGUMENTS, "bounds that are computed", "literal bounds")
    is_relu = post_op.name == "relu"
    if site.out != x.qparams and not is_relu:
        asked = str(site.out) if site.out is not None else "a float result"
        return site.refuse(ReasonCode.OTHER_QPARAMS, asked, f"the input's: {x.qparams}")
    low, high = integer_bounds(x.qparams, *((0.0, float("inf")) if is_relu else post_op.numbers))
    return Emit(clamp, (x.node, low, high), "aten.clamp(integers)", x.qparams, in_range=True)


def integer_bounds(qparams: QParams, low: float, high: float) -> tuple[int, int]:
    """The integers that the bounds of a clamp become.

    >>> import torch
    >>> integer_bounds(QParams(0.1, 10, 0, 255, torch.uint8), 0.0, 6.0)
    (10, 70)
    """
    return quantized_value(low, qparams), quantized_value(high, qparams)
