"""Activation functions that stand alone.

Those that cut values off keep the qparams of the input in the reference model, and run as a clamp of
integers: quantization is monotone, so clamping before or after it is the same.
"""

from __future__ import annotations

from typing import Any

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import first_operand, refuse_float_input
from backquant.engines.tables.spellings import CLAMPS, HARDTANHS, RELU6S, RELUS, post_op_of
from backquant.lower.kernels.activation import clamp
from backquant.lower.qdq import quantized_value
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode


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
