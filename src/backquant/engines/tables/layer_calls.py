"""Convolutions and linear layers as reference models write them: modules and functions, read into one
form, from which each set of kernels makes its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backquant.engines.tables.arguments import (
    POST_OPS,
    bind,
    is_computed,
    numbers,
    refuse_float_input,
)
from backquant.engines.tables.weights import functional_weight, module_weight
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.qdq import dynamic_input, is_channel_dequantize
from backquant.lower.rule import Emit, LowerRule, Operand, Site, operand
from backquant.match.plan import Reason
from backquant.nn.quantized.reference import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Linear,
)
from backquant.operators import named
from backquant.reason_codes import ReasonCode


def functions_of(*names: str) -> tuple[Any, ...]:
    """The functions of the operators of these names.

    >>> functions_of("linear") == (torch.nn.functional.linear,)
    True
    """
    return tuple(function for name in names for function in named(name).functions)


_CONVS: tuple[Any, ...] = (Conv1d, Conv2d, Conv3d)
_F_CONVS: tuple[Any, ...] = functions_of("conv1d", "conv2d", "conv3d")
_TRANSPOSED: tuple[Any, ...] = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_F_TRANSPOSED: tuple[Any, ...] = functions_of(
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"
)
_LINEARS: tuple[Any, ...] = (Linear,)
_F_LINEARS: tuple[Any, ...] = functions_of("linear")

_CONV_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_NAMES = (
    "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
)  # fmt: skip
_DEFAULTS = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "output_padding": 0,
}


@dataclass(frozen=True)
class Geometry:
    """The numbers of a convolution, one per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightedCall:
    """One convolution or linear layer. ``axis``: along which the weight's scales lie; ``transposed``: of a
    convolution."""

    x: Operand
    weight: WeightTensors
    axis: int
    geometry: Geometry | None = None
    transposed: bool = False


Make = Callable[[Site, WeightedCall], Emit | Reason]
_Build = Callable[[Site], Emit | Reason | None]
_Read = Callable[[Site], WeightedCall | Reason]


def conv_rules(make: Make, at_each_call: Make | None = None) -> list[LowerRule]:
    """Rules for convolutions, alone and with a unary operator behind; ``at_each_call``: of inputs that are
    quantized then.

    >>> [rule.name for rule in conv_rules(lambda site, call: None)]
    ['conv + activation', 'conv', 'functional conv + activation', 'functional conv']
    """
    modules, functions = (_CONVS, _read_conv), (_F_CONVS, _read_functional_conv)
    return _rules("conv", modules, functions, make, at_each_call)


def linear_rules(make: Make) -> list[LowerRule]:
    """Rules for linear layers, alone and with a unary operator behind.

    >>> [rule.name for rule in linear_rules(lambda site, call: None)]
    ['linear + activation', 'linear', 'functional linear + activation', 'functional linear']
    """
    return _rules("linear", (_LINEARS, _read_linear), (_F_LINEARS, _read_functional_linear), make)


def conv_transpose_rules(make: Make, at_each_call: Make | None = None) -> list[LowerRule]:
    """Rules for transposed convolutions; ``at_each_call`` as in ``conv_rules``.

    >>> [rule.name for rule in conv_transpose_rules(lambda site, call: None)]
    ['conv_transpose', 'functional conv_transpose']
    """
    return [
        LowerRule("conv_transpose", (_TRANSPOSED,), _build(_read_transposed, make, at_each_call)),
        LowerRule(
            "functional conv_transpose",
            (_F_TRANSPOSED,),
            _build(_read_functional_transposed, make, at_each_call),
        ),
    ]


def _rules(
    name: str,
    modules: tuple[tuple[Any, ...], _Read],
    functions: tuple[tuple[Any, ...], _Read],
    make: Make,
    at_each_call: Make | None = None,
) -> list[LowerRule]:
    found = []
    for prefix, (keys, read) in (("", modules), ("functional ", functions)):
        build = _build(read, make, at_each_call)
        found.append(LowerRule(f"{prefix}{name} + activation", (keys, POST_OPS), build))
        found.append(LowerRule(f"{prefix}{name}", (keys,), build))
    return found


def _build(read: _Read, make: Make, at_each_call: Make | None = None) -> _Build:
    def build(site: Site) -> Emit | Reason | None:
        call = read(site)
        if isinstance(call, Reason):
            return call
        if at_each_call is not None and dynamic_input(call.x.node) is not None:
            return at_each_call(site, call)
        return _float_input(site, call) if call.x.qparams is None else make(site, call)

    return build


def _float_input(site: Site, call: WeightedCall) -> Reason | None:
    """Dynamic and float16 linear layers have rules of their own, in ``tables.dynamic``."""
    dtype = call.weight.weight.dtype
    dynamic = dynamic_input(call.x.node) is not None
    if not dynamic and not dtype.is_floating_point:
        return refuse_float_input(site)
    if site.steps[0].key in (*_LINEARS, *_F_LINEARS):
        return None
    asked = f"{'dynamic' if dynamic else 'static'} quantization with a weight of {dtype}"
    return site.refuse(ReasonCode.NO_KERNEL, asked, f"engine {site.engine.name} has no such kernel")


def explicit_padding(padding: Any, weight: torch.Tensor, dilation: list[int]) -> list[int] | None:
    """Padding per dimension, also for ``"valid"`` and ``"same"``; ``None`` if it is not symmetric.

    >>> explicit_padding("same", torch.empty(1, 1, 3, 5), [1, 2])
    [1, 4]
    """
    if padding == "valid":
        return [0] * len(dilation)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return None if any(t % 2 for t in total) else [t // 2 for t in total]
    return numbers(padding, len(dilation))


def _geometry(site: Site, found: dict[str, Any], weight: torch.Tensor) -> Geometry | Reason:
    dims = weight.dim() - 2
    dilation = numbers(found["dilation"], dims)
    padding = explicit_padding(found["padding"], weight, dilation)
    if padding is None:
        return site.refuse(
            ReasonCode.PADDING, "padding='same' that is not symmetric", "symmetric padding"
        )
    return Geometry(
        tuple(numbers(found["stride"], dims)),
        tuple(padding),
        tuple(dilation),
        int(found["groups"]),
        tuple(numbers(found.get("output_padding", 0), dims)),
    )


def _one_argument(site: Site) -> Operand | Reason:
    """The only argument of a module's call."""
    if len(site.node.args) == 1 and not site.node.kwargs:
        return operand(site.node.args[0])  # type: ignore[arg-type]  # a tensor's node
    return site.refuse(ReasonCode.ARGUMENTS, "a call with more than the input", "the input alone")


def _read_conv(site: Site) -> WeightedCall | Reason:
    x = _one_argument(site)
    return x if isinstance(x, Reason) else module_call(site, x)


def module_call(site: Site, x: Operand) -> WeightedCall | Reason:
    """The convolution module of a site, on ``x``."""
    module: Any = site.module
    if module.padding_mode != "zeros":
        return site.refuse(
            ReasonCode.PADDING_MODE, f"padding_mode={module.padding_mode!r}", "'zeros'"
        )
    names = ("stride", "padding", "dilation", "groups")
    weight = module_weight(module)
    geometry = _geometry(site, {name: getattr(module, name) for name in names}, weight.weight)
    if isinstance(geometry, Reason):
        return geometry
    return WeightedCall(x, weight, module.weight_axis, geometry)


def _read_transposed(site: Site) -> WeightedCall | Reason:
    module: Any = site.module
    x = _one_argument(site)
    if isinstance(x, Reason):
        return x
    names = ("stride", "padding", "dilation", "groups", "output_padding")
    weight = module_weight(module)
    geometry = _geometry(site, {name: getattr(module, name) for name in names}, weight.weight)
    if isinstance(geometry, Reason):
        return geometry
    return WeightedCall(x, weight, module.weight_axis, geometry, transposed=True)


def _read_linear(site: Site) -> WeightedCall | Reason:
    module: Any = site.module
    x = _one_argument(site)
    if isinstance(x, Reason):
        return x
    return WeightedCall(x, module_weight(module), module.weight_axis)


def _computed(site: Site) -> Reason:
    return site.refuse(
        ReasonCode.COMPUTED_WEIGHT,
        "a weight or bias that is computed in the graph",
        "a constant weight, quantized along axis 0, and a constant bias",
    )


def _scale_axis(weight: object) -> int:
    """Along which axis the scales of a functional weight lie."""
    axis = weight.args[3] if is_channel_dequantize(weight) else 0  # type: ignore[attr-defined]
    return axis if isinstance(axis, int) else 0


def _read_functional(site: Site, names: tuple[str, ...]) -> WeightedCall | Reason:
    found = bind(site.node, names, {name: _DEFAULTS[name] for name in names if name in _DEFAULTS})
    axis = _scale_axis(found["weight"]) if found else 0
    weight = found and functional_weight(site.graph_module, found["weight"], found["bias"], axis)
    x = operand(found["input"]) if found else None
    if not found or not weight or x is None:
        floats = x is not None and x.qparams is None and dynamic_input(x.node) is None
        return refuse_float_input(site) if floats else _computed(site)
    if "stride" not in names:
        return WeightedCall(x, weight, axis)
    if any(is_computed(found[name]) for name in names[3:]):
        return site.refuse(ReasonCode.ARGUMENTS, "sizes that are computed", "literal sizes")
    geometry = _geometry(site, found, weight.weight)
    if isinstance(geometry, Reason):
        return geometry
    return WeightedCall(x, weight, axis, geometry, transposed="output_padding" in names)


def _read_functional_conv(site: Site) -> WeightedCall | Reason:
    return _read_functional(site, _CONV_NAMES)


def _read_functional_transposed(site: Site) -> WeightedCall | Reason:
    return _read_functional(site, _TRANSPOSED_NAMES)


def _read_functional_linear(site: Site) -> WeightedCall | Reason:
    return _read_functional(site, ("input", "weight", "bias"))
