"""From the aten operators of an exported graph to the spellings that entries of backends use.

An overload belongs to the operator that lists it. Its call is that of the operator's canonical spelling,
with the same arguments. ``_ARGUMENTS`` holds those whose arguments differ, and further overloads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.export import Call
from backquant.operators.composed import composed
from backquant.operators.index import find
from backquant.operators.operator import Operator
from backquant.operators.rebuilt import rebuilt_module

__all__ = ["AtenSpeller"]

_aten = torch.ops.aten

# What a symbolic trace shows most often, where that is not the first function of an operator.
_CANONICAL: dict[str, Any] = {
    "reshape": "reshape",
    "permute": "permute",
    "view": "view",
    "repeat": "repeat",
    "contiguous": "contiguous",
    "size": "size",
    "detach": "detach",
}
_WITH_SIZES = ("view", "reshape", "permute", "repeat")


class AtenSpeller:
    """The table of ``backquant.operators`` as ``backquant.graph`` asks for it.

    >>> speller = AtenSpeller()
    >>> speller.call(_aten.add.Tensor, (1, 2), {}).target is operator.add
    True
    >>> speller.call(_aten.bmm.default, (1, 2), {}).target is torch.matmul
    True
    """

    def composed(self, node: fx.Node) -> fx.Node | None:
        """See ``backquant.operators.composed``."""
        return composed(node)

    def call(self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The canonical spelling of a call; ``None`` for an overload that no operator lists."""
        adapt = _ARGUMENTS.get(overload)
        if adapt is not None:
            return adapt(*args, **kwargs)
        known = find(overload)
        if known is None:
            return None
        target = canonical(known)
        if target is None:
            return None
        if target is operator.add or target is operator.sub or target is operator.mul:
            return _arithmetic(target, args, kwargs)
        if isinstance(target, str):
            sizes = args[1] if len(args) > 1 else None
            if target in _WITH_SIZES and isinstance(sizes, (list, tuple)):
                args = (args[0], *sizes)
            return Call("call_method", target, args, kwargs)
        return Call("call_function", target, args, kwargs)

    def module(
        self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> nn.Module | None:
        """See ``backquant.operators.rebuilt``."""
        return rebuilt_module(overload, args, kwargs)


def canonical(known: Operator) -> Any:
    """The function, or the name of the method, by which exported graphs show an operator.

    >>> canonical(find("view")), canonical(find(F.relu)) is F.relu
    ('view', True)
    """
    if known.name in _CANONICAL:
        return _CANONICAL[known.name]
    return next(iter((*known.functions, *known.methods)), None)


def _arithmetic(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    if not kwargs:
        return Call("call_function", target, args)
    return Call("call_function", getattr(torch, target.__name__), args, kwargs)


def _function(target: Any, *args: Any, **kwargs: Any) -> Call:
    """A call without trailing arguments that are ``None``."""
    values = list(args)
    while values and values[-1] is None:
        values.pop()
    return Call("call_function", target, tuple(values), kwargs)


def _softmax(x: Any, dim: int, dtype: Any = None) -> Call:
    return _function(F.softmax, x, dim, **({} if dtype is None else {"dtype": dtype}))


def _layer_norm(x: Any, shape: Any, *rest: Any, **_: Any) -> Call:
    weight, bias, eps = (*rest, None, None, None)[:3]
    kwargs = {} if eps is None else {"eps": eps}
    return _function(F.layer_norm, x, tuple(shape), weight, bias, **kwargs)


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Call:
    return _function(F.rms_norm, x, tuple(shape), weight, eps)


def _group_norm(x: Any, groups: int, *rest: Any, **_: Any) -> Call:
    weight, bias, eps = (*rest, None, None, None)[:3]
    kwargs = {} if eps is None else {"eps": eps}
    return _function(F.group_norm, x, groups, weight, bias, **kwargs)


# size: the overload's arguments
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
    _: bool = False,
) -> Call:  # fmt: skip
    return _function(F.batch_norm, x, mean, var, weight, bias, training, momentum, eps)


# size: the overload's arguments
def _instance_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, use_input: bool, momentum: float, eps: float,
    _: bool = False,
) -> Call:  # fmt: skip
    return _function(F.instance_norm, x, mean, var, weight, bias, use_input, momentum, eps)


def _embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: Any) -> Call:
    if padding_idx < 0:
        return _function(F.embedding, indices, weight)
    return _function(F.embedding, indices, weight, padding_idx)


def _hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Call:
    if (low, high) == (0.0, 6.0):
        return _function(F.relu6, x)
    return _function(F.hardtanh, x, low, high)


def _elu(x: Any, alpha: float = 1.0, *_: Any) -> Call:
    return _function(F.elu, x, alpha)


def _matmul(x: Any, y: Any) -> Call:
    return _function(torch.matmul, x, y)


def _constant_pad(x: Any, pad: Any, value: float = 0) -> Call:
    return _function(F.pad, x, pad, "constant", value)


def _upsampled(mode: str) -> Callable[..., Call]:
    def resize(x: Any, size: Any, *rest: Any) -> Call:
        *corners, factors = rest
        kwargs: dict[str, Any] = {"mode": mode}
        if corners:
            kwargs["align_corners"] = corners[0]
        return _function(F.interpolate, x, size, factors, **kwargs)

    return resize


_ARGUMENTS: dict[Any, Callable[..., Call]] = {
    _aten.conv1d.padding: partial(_function, F.conv1d),
    _aten.conv2d.padding: partial(_function, F.conv2d),
    _aten.conv3d.padding: partial(_function, F.conv3d),
    _aten.softmax.int: _softmax,
    _aten.hardtanh.default: _hardtanh,
    _aten.layer_norm.default: _layer_norm,
    _aten.group_norm.default: _group_norm,
    _aten.rms_norm.default: _rms_norm,
    _aten.batch_norm.default: _batch_norm,
    _aten.instance_norm.default: _instance_norm,
    _aten.embedding.default: _embedding,
    _aten.elu.default: _elu,
    _aten.mm.default: _matmul,
    _aten.constant_pad_nd.default: _constant_pad,
    _aten.upsample_nearest1d.vec: _upsampled("nearest"),
    _aten.upsample_nearest2d.vec: _upsampled("nearest"),
    _aten.upsample_nearest3d.vec: _upsampled("nearest"),
    _aten.upsample_linear1d.vec: _upsampled("linear"),
    _aten.upsample_bilinear2d.vec: _upsampled("bilinear"),
    _aten.upsample_bicubic2d.vec: _upsampled("bicubic"),
    _aten.upsample_trilinear3d.vec: _upsampled("trilinear"),
}
