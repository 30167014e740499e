"""Interpolation and padding. Nearest neighbours select values and run under any qparams; bilinear
interpolation and constant padding keep the qparams of the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import bind, first_operand, refuse_float_input
from backquant.lower.kernels.resize import resize_bilinear, resize_nearest
from backquant.lower.qdq import quantized_value
from backquant.lower.rule import Emit, LowerRule, Site
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

_NAMES = (
    "input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias",
)  # fmt: skip
_DEFAULTS = {
    "size": None,
    "scale_factor": None,
    "mode": "nearest",
    "align_corners": None,
    "recompute_scale_factor": None,
    "antialias": False,
}
RESIZES: tuple[Any, ...] = (
    *spellings("interpolate"), nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.upsample,
)  # fmt: skip
PADS: tuple[Any, ...] = (
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
)  # fmt: skip


def resize_rules() -> list[LowerRule]:
    """Rules for interpolation and padding.

    >>> [rule.name for rule in resize_rules()]
    ['interpolate', 'pad', 'pad module']
    """
    return [
        LowerRule("interpolate", (RESIZES,), _interpolate),
        LowerRule("pad", ((F.pad,),), _pad),
        LowerRule("pad module", (PADS,), _pad),
    ]


def resize_arguments(site: Site) -> dict[str, Any] | Reason:
    """The arguments of ``interpolate``; sizes may be computed."""
    module = site.steps[0].module
    found: dict[str, Any] | None
    if module is not None:
        found = {name: getattr(module, name, _DEFAULTS[name]) for name in _NAMES[1:]}
    else:
        found = bind(site.node, _NAMES, {"input": None, **_DEFAULTS})
    if found is None or found["antialias"] or not isinstance(found["mode"], str):
        return site.refuse(ReasonCode.ARGUMENTS, "antialias or a computed mode", "neither")
    return found


def _interpolate(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    found = resize_arguments(site)
    if isinstance(found, Reason):
        return found
    if found["mode"] in ("nearest", "nearest-exact"):
        # Sizes may be computed: they are numbers of the graph.
        kwargs = {name: found[name] for name in _NAMES[1:4]}
        kwargs["recompute_scale_factor"] = found["recompute_scale_factor"]
        name = "aten.interpolate(nearest)"
        if x.qparams.dtype == torch.int8:
            order = ("size", "scale_factor", "mode", "recompute_scale_factor")
            numbers = tuple(found[key] for key in order)
            return Emit(resize_nearest, (x.node, *numbers), name, x.qparams, in_range=True)
        return Emit(F.interpolate, (x.node,), name, x.qparams, kwargs, in_range=True)
    if found["mode"] != "bilinear":
        return site.refuse(ReasonCode.MODE, found["mode"], "nearest, nearest-exact, bilinear")
    if site.out != x.qparams:
        return _other_qparams(site, x.qparams)
    names = ("size", "scale_factor", "align_corners", "recompute_scale_factor")
    args = (x.node, *x.qparams.args, *(found[name] for name in names))
    return Emit(resize_bilinear, args, "aten.interpolate(bilinear)", x.qparams, in_range=True)


def _other_qparams(site: Site, x: QParams) -> Reason:
    asked = str(site.out) if site.out is not None else "a float result"
    return site.refuse(ReasonCode.OTHER_QPARAMS, asked, f"the input's: {x}")


def pad_arguments(site: Site) -> tuple[Any, str, float] | Reason:
    """The sizes, the mode and the value of a padding."""
    module: Any = site.steps[0].module
    if module is not None:
        return list(module.padding), "constant", getattr(module, "value", 0.0)
    names = ("input", "pad", "mode", "value")
    found = bind(site.node, names, {"input": None, "mode": "constant", "value": None})
    if found is None:
        return site.refuse(ReasonCode.ARGUMENTS, "unknown arguments", "pad, mode, value")
    value = 0.0 if found["value"] is None else found["value"]
    if not isinstance(value, (int, float)) or not isinstance(found["mode"], str):
        return site.refuse(ReasonCode.ARGUMENTS, "a value that is computed", "a literal value")
    return found["pad"], found["mode"], value


def _pad(site: Site) -> Emit | Reason:
    x = first_operand(site)
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    found = pad_arguments(site)
    if isinstance(found, Reason):
        return found
    pad, mode, value = found
    if mode != "constant":
        return Emit(F.pad, (x.node, pad, mode), f"aten.pad({mode})", x.qparams, in_range=True)
    integer = quantized_value(value, x.qparams)
    exact = (integer - x.qparams.zero_point) * x.qparams.scale == value
    if not exact and site.out != x.qparams:
        return _other_qparams(site, x.qparams)
    args = (x.node, pad, "constant", integer)
    return Emit(F.pad, args, "aten.pad(constant)", x.qparams, in_range=True)
