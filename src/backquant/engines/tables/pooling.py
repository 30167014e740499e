"""Pooling. Maxima select values: they run on the integers under any qparams. Averages keep the qparams
of the input, as the reference model does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.dtypes import QParams
from backquant.engines.tables.arguments import bind, first_operand, numbers, refuse_float_input
from backquant.lower.kernels import pooling
from backquant.lower.kernels.resize import resize_bilinear, resize_nearest
from backquant.lower.qdq import quantized_value
from backquant.lower.rule import Emit, LowerRule, Operand, Site
from backquant.match.plan import Reason
from backquant.operators import spellings
from backquant.reason_codes import ReasonCode

_MAX_NAMES = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "ceil_mode",
    "return_indices",
)
_MAX_DEFAULTS = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
_AVG_NAMES = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
_AVG_DEFAULTS = {
    "stride": None,
    "padding": 0,
    "ceil_mode": False,
    "count_include_pad": True,
    "divisor_override": None,
}
_Build = Callable[[Site], Emit | Reason]


@dataclass(frozen=True)
class Window:
    """The literals of a pooling, one number for each axis of space."""

    size: list[int]
    stride: list[int]
    padding: list[int]
    ceil_mode: bool
    dilation: list[int] = field(default_factory=list)
    count_include_pad: bool = True
    divisor_override: int | None = None


def max_rules() -> list[LowerRule]:
    """Max pooling in one to three dimensions.

    >>> [rule.name for rule in max_rules()]
    ['max_pool1d', 'max_pool2d', 'max_pool3d']
    """
    kernels = (pooling.max_pool1d, pooling.max_pool2d, pooling.max_pool3d)
    return _by_dimension("max_pool", kernels, _max)


def _by_dimension(
    name: str, kernels: Iterable[Callable[..., torch.Tensor]], build: Callable[..., _Build]
) -> list[LowerRule]:
    return [
        LowerRule(f"{name}{rank}d", (spellings(f"{name}{rank}d"),), build(kernel, rank))
        for rank, kernel in enumerate(kernels, 1)
    ]


def average_rules() -> list[LowerRule]:
    """Average pooling in one to three dimensions.

    >>> [rule.name for rule in average_rules()]
    ['avg_pool1d', 'avg_pool2d', 'avg_pool3d']
    """
    kernels: tuple[Any, ...] = (pooling.avg_pool1d, pooling.avg_pool2d, pooling.avg_pool3d)
    return _by_dimension("avg_pool", kernels, _average)


def adaptive_rules() -> list[LowerRule]:
    """Adaptive average pooling in one to three dimensions.

    >>> [rule.name for rule in adaptive_rules()]
    ['adaptive_avg_pool1d', 'adaptive_avg_pool2d', 'adaptive_avg_pool3d']
    """
    kernels = (
        pooling.adaptive_avg_pool1d, pooling.adaptive_avg_pool2d, pooling.adaptive_avg_pool3d,
    )  # fmt: skip
    return _by_dimension("adaptive_avg_pool", kernels, _adaptive)


def mean_rules() -> list[LowerRule]:
    """The mean over given dimensions.

    >>> [rule.name for rule in mean_rules()]
    ['mean']
    """
    return [LowerRule("mean", ((torch.mean, "mean"),), _mean)]


def settings(site: Site, names: tuple[str, ...], defaults: dict[str, Any]) -> dict[str, Any] | None:
    """The literals of a pooling, from its module or its call; ``None`` if one is computed."""
    module = site.steps[0].module
    if module is not None:
        return {name: getattr(module, name, defaults.get(name)) for name in names[1:]}
    found = bind(site.node, names, {**defaults, "input": None})
    if found is None:
        return None
    literals = {name: found[name] for name in names[1:]}
    return None if _has_node(list(literals.values())) else literals


def _has_node(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(_has_node(value) for value in values)
    return isinstance(values, torch.fx.Node)


def _computed(site: Site) -> Reason:
    return site.refuse(
        ReasonCode.ARGUMENTS, "sizes that are computed in the graph", "literal sizes"
    )


def max_window(site: Site, dims: int) -> Window | Reason:
    """The literals of a maximum over windows."""
    found = settings(site, _MAX_NAMES, {**_MAX_DEFAULTS, "return_indices": False})
    if found is None:
        return _computed(site)
    if found["return_indices"]:
        return site.refuse(ReasonCode.RETURN_INDICES, "return_indices=True", "values only")
    return replace(_window(found, dims), dilation=numbers(found["dilation"], dims))


def _window(found: dict[str, Any], dims: int) -> Window:
    size = numbers(found["kernel_size"], dims)
    stride = found["stride"] if found["stride"] not in (None, [], ()) else size
    padding = numbers(found["padding"], dims)
    return Window(size, numbers(stride, dims), padding, bool(found["ceil_mode"]))


def _max(kernel: Callable[..., torch.Tensor], dims: int) -> _Build:
    def build(site: Site) -> Emit | Reason:
        x = first_operand(site)
        window = max_window(site, dims)
        if isinstance(window, Reason):
            return window
        if x is None or x.qparams is None:
            return refuse_float_input(site)
        sizes = (window.size, window.stride, window.padding, window.dilation)
        args = (x.node, *sizes, window.ceil_mode)
        return Emit(
            kernel,
            args,
            f"{'aten' if dims == 3 else 'quantized'}.{kernel.__name__}",
            x.qparams,
            in_range=True,
        )

    return build


def average_window(site: Site, dims: int) -> Window | Reason:
    """The literals of an average over windows."""
    names = _AVG_NAMES[:-1] if dims == 1 else _AVG_NAMES
    found = settings(site, names, _AVG_DEFAULTS)
    if found is None:
        return _computed(site)
    return replace(
        _window(found, dims),
        count_include_pad=bool(found["count_include_pad"]),
        divisor_override=found.get("divisor_override"),
    )


def _average(kernel: Callable[..., torch.Tensor], dims: int) -> _Build:
    def build(site: Site) -> Emit | Reason:
        x = first_operand(site)
        window = average_window(site, dims)
        if isinstance(window, Reason):
            return window
        refused = _check_average(site, x)
        if refused or x is None or x.qparams is None:
            return refused or refuse_float_input(site)
        args = (
            x.node,
            *x.qparams.args,
            window.size,
            window.stride,
            window.padding,
            window.ceil_mode,
            window.count_include_pad,
            *([window.divisor_override] if dims > 1 else []),
        )
        return Emit(kernel, args, f"aten.{kernel.__name__}(quantized)", x.qparams)

    return build


def adaptive_sizes(site: Site, dims: int) -> list[int | None] | Reason:
    """The literal sizes that an average is to have; None: that of the input."""
    found = settings(site, ("input", "output_size"), {})
    if found is None:
        return _computed(site)
    size = found["output_size"]
    return [size] * dims if size is None or isinstance(size, int) else list(size)


def _adaptive(kernel: Callable[..., torch.Tensor], dims: int) -> _Build:
    def build(site: Site) -> Emit | Reason:
        x = first_operand(site)
        sizes = adaptive_sizes(site, dims)
        if isinstance(sizes, Reason):
            return sizes
        refused = _check_average(site, x)
        if refused or x is None or x.qparams is None:
            return refused or refuse_float_input(site)
        args = (x.node, *x.qparams.args, sizes)
        return Emit(kernel, args, f"aten.{kernel.__name__}(quantized)", x.qparams, in_range=True)

    return build


def mean_dims(site: Site) -> tuple[list[int], bool] | Reason:
    """Over which axes, and whether they stay as 1."""
    found = settings(site, ("input", "dim", "keepdim"), {"dim": None, "keepdim": False})
    if found is None or found["dim"] is None:
        return site.refuse(
            ReasonCode.ARGUMENTS, "a mean over all or computed dimensions", "literal dim"
        )
    dim = found["dim"]
    return [dim] if isinstance(dim, int) else list(dim), bool(found["keepdim"])


def _mean(site: Site) -> Emit | Reason:
    x = first_operand(site)
    found = mean_dims(site)
    if isinstance(found, Reason):
        return found
    refused = _check_average(site, x)
    if refused or x is None or x.qparams is None:
        return refused or refuse_float_input(site)
    args = (x.node, *x.qparams.args, *found)
    return Emit(pooling.mean, args, "aten.mean(quantized)", x.qparams, in_range=True)


def _check_average(site: Site, x: Operand | None) -> Reason | None:
    """An average is rounded to the input's qparams; that is exact only if the output has them."""
    if x is None or x.qparams is None:
        return refuse_float_input(site)
    if site.out is None:
        return site.refuse(ReasonCode.FLOAT_OUTPUT, "a float average", "a quantized result")
    if site.out != x.qparams:
        return site.refuse(ReasonCode.OTHER_QPARAMS, str(site.out), f"the input's: {x.qparams}")
    return None


# Interpolation and padding. Nearest neighbours select values and run under any qparams; bilinear
# interpolation and constant padding keep the qparams of the input.

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
