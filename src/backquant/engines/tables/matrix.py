"""Softmax, and products of two integer matrices."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from backquant.engines.tables.arguments import bind, integer_pair
from backquant.lower.kernels import matrix
from backquant.lower.rule import Emit, LowerRule, Site, operand
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

_SOFTMAX: tuple[Any, ...] = spellings("softmax")
_MATMUL: tuple[Any, ...] = spellings("matmul")


def matrix_rules() -> list[LowerRule]:
    """Rules for softmax and for the product of two activations.

    >>> [rule.name for rule in matrix_rules()]
    ['softmax', 'matmul']
    """
    return [LowerRule("softmax", (_SOFTMAX,), _softmax), LowerRule("matmul", (_MATMUL,), _matmul)]


def softmax_dim(site: Site) -> int | Reason:
    """The literal axis of a softmax."""
    dim: Any = None
    if site.steps[0].module is not None:
        dim = site.module.dim
    else:
        defaults = {"input": None, "dim": None, "_stacklevel": 3, "dtype": None}
        arguments = bind(site.node, ("input", "dim", "_stacklevel", "dtype"), defaults)
        dim = arguments["dim"] if arguments else None
    if not isinstance(dim, int):
        return site.refuse(
            ReasonCode.ARGUMENTS, "softmax over an implied dimension", "a literal dim"
        )
    return dim


def _softmax(site: Site) -> Emit | Reason:
    found = integer_pair(site)
    if isinstance(found, Reason):
        return found
    x, out = found
    dim = softmax_dim(site)
    if isinstance(dim, Reason):
        return dim
    assert x.qparams is not None
    args = (x.node, *x.qparams.args, dim, *out.args)
    return Emit(matrix.softmax, args, "quantized.softmax", out)


def _matmul(site: Site) -> Emit | Reason:
    pair = site.node.args
    if len(pair) != 2 or site.node.kwargs or not all(isinstance(node, Node) for node in pair):
        return site.refuse(ReasonCode.ARGUMENTS, "keywords or constants", "two positional tensors")
    x, y = (operand(node) for node in pair)  # type: ignore[arg-type]
    if x.qparams is None or y.qparams is None:
        return site.refuse(
            ReasonCode.FLOAT_INPUT, "a factor computed in float", "two integer factors"
        )
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float result", "a quantized result")
    if not x.qparams.dtype == y.qparams.dtype == site.out.dtype:
        asked = f"{x.qparams.dtype}, {y.qparams.dtype} to {site.out.dtype}"
        return site.refuse(
            ReasonCode.MIXED_DTYPES, asked, "one dtype for both factors and the result"
        )
    args = (x.node, *x.qparams.args, y.node, *y.qparams.args, *site.out.args)
    return Emit(matrix.matmul, args, "quantized.matmul", site.out)
