"""What every rule of the integer reference reads of a site: qparams, and the described arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import first_operand, refuse_float_input
from backquant.lower.kernels.integer.result import IntegerKernel
from backquant.lower.rule import Emit, Site
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

#: for kernels whose sums come out as floats
NO_RESULT = QParams(1.0, 0, -1, 0, torch.int8)


def result_fields(site: Site, out: QParams) -> dict[str, Any]:
    """The fields of a ``Result`` with the qparams ``out``."""
    requantization, rounding = site.arithmetic
    return {
        "out_scale": out.scale,
        "out_zero_point": out.zero_point,
        "quant_min": out.quant_min,
        "quant_max": out.quant_max,
        "integer_dtype": out.dtype,
        "requantization": requantization,
        "rounding": rounding,
    }


def one_operand(site: Site) -> tuple[Node, QParams, QParams] | Reason:
    """The integers that the site reads first, their qparams, and those of the result."""
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if site.out is None:
        return refuse_float_result(site)
    return x.node, x.qparams, site.out


def refuse_float_result(site: Site) -> Reason:
    """The reason for an operator whose result is not quantized."""
    return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")


def emit(site: Site, kernel: IntegerKernel, *nodes: Any) -> Emit:
    """A kernel that gives integers of the site's qparams."""
    return Emit(kernel, nodes, kernel.name, site.out, in_range=True)
