"""Interpolation, padding and rows of tables of the integer reference."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.nn import functional as F

from backquant.engines.tables.arguments import first_operand, refuse_float_input
from backquant.engines.tables.integer.result import emit, one_operand, result_fields
from backquant.engines.tables.resize import PADS, RESIZES, pad_arguments, resize_arguments
from backquant.lower.kernels.integer.resize import (
    BilinearConfig,
    IntegerBilinear,
    nearest,
    padded,
)
from backquant.lower.qdq import quantized_value
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import Embedding, EmbeddingBag
from backquant.reason_codes import ReasonCode


def resize_rules() -> list[LowerRule]:
    """Rules for interpolation and padding.

    >>> [rule.name for rule in resize_rules()]
    ['interpolate', 'pad']
    """
    return [
        LowerRule("interpolate", (RESIZES,), _interpolate),
        LowerRule("pad", ((F.pad, *PADS),), _pad),
    ]


def _interpolate(site: Site) -> Emit | Reason:
    found, x = resize_arguments(site), first_operand(site)
    if isinstance(found, Reason):
        return found
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    size, factor, mode = (found[name] for name in ("size", "scale_factor", "mode"))
    exactly = found["recompute_scale_factor"]
    if mode in ("nearest", "nearest-exact"):
        args = (x.node, size, factor, mode, exactly)
        return Emit(nearest, args, f"integer.{mode}", x.qparams, in_range=True)
    if mode != "bilinear":
        return site.refuse(ReasonCode.MODE, mode, "nearest, nearest-exact, bilinear")
    if any(isinstance(each, Node) for each in _each(factor)):
        return site.refuse(ReasonCode.ARGUMENTS, "a computed scale factor", "a literal factor")
    pair = one_operand(site)
    if isinstance(pair, Reason):
        return pair
    node, own, out = pair
    config = BilinearConfig(
        **result_fields(site, out),
        x_scale=own.scale,
        x_zero_point=own.zero_point,
        align_corners=bool(found["align_corners"]),
        recompute_scale_factor=bool(exactly),
        scale_factor=tuple(float(each) for each in _each(factor)),
    )
    return emit(site, IntegerBilinear(config), node, size)


def _each(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _pad(site: Site) -> Emit | Reason:
    x, found = first_operand(site), pad_arguments(site)
    if isinstance(found, Reason):
        return found
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    pad, mode, value = found
    args = (x.node, pad, mode, quantized_value(value, x.qparams))
    return Emit(padded, args, f"integer.pad({mode})", x.qparams, in_range=True)


def embedding_rules() -> list[LowerRule]:
    """The rule for tables of integers, whose rows are floats where they are read.

    >>> [rule.name for rule in embedding_rules()]
    ['embedding']
    """
    return [LowerRule("embedding", ((Embedding, EmbeddingBag),), _rows)]


def _rows(site: Site) -> Emit:
    """The reference module itself: it picks integers and dequantizes them."""
    return Emit(site.module, site.node.args, "integer.rows", None, site.node.kwargs)
