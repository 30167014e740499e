"""Weights of functional layers in PyTorch's quantized dialect: objects of its engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_KINDS: dict[Any, tuple[str, int]] = {
    F.linear: ("linear", 0),
    F.conv1d: ("conv1d", 1),
    F.conv2d: ("conv2d", 2),
    F.conv3d: ("conv3d", 3),
}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_STORED = tuple(
    f"quantized_decomposed.dequantize_per_{kind}.default" for kind in ("channel", "tensor")
)


def functional_name(node: fx.Node) -> str:
    """The word of ``torch.ops.quantized`` for a functional layer; empty where there is none.

    >>> functional_name(fx.symbolic_trace(lambda x, w: F.linear(x, w)).graph.find_nodes(
    ...     op="call_function", target=F.linear)[0])
    'linear'
    """
    return _KINDS.get(node.target, ("", 0))[0] if node.op == "call_function" else ""


def packed_weight(root: Any, node: fx.Node) -> Any:
    """The engine's object for the constant weight and bias of ``node``; ``None`` where they are others."""
    kind, rank = _KINDS[node.target]
    found: dict[str, Any] = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    weight, bias = found.get("weight"), found.get("bias")
    stored = (
        weight.args[0] if isinstance(weight, fx.Node) and str(weight.target) in _STORED else None
    )
    if not isinstance(stored, fx.Node) or stored.op != "get_attr":
        return None
    assert isinstance(weight, fx.Node)
    if isinstance(bias, fx.Node) and bias.op != "get_attr":
        return None
    integers = _tensor(root, stored)
    if integers.dtype != torch.int8:
        return None
    if "per_channel" in str(weight.target):
        scale, zero_point = (_tensor(root, n) for n in weight.args[1:3])
        axis: Any = weight.args[3]
        make = torch._make_per_channel_quantized_tensor
        quantized = make(integers, scale.double(), zero_point.long(), axis)
    else:
        scale_number, zero_number = weight.args[1:3]
        quantized = torch._make_per_tensor_quantized_tensor(integers, scale_number, zero_number)
    prepack = getattr(torch.ops.quantized, f"{kind}_prepack")
    settings = [
        _spread(found.get(name, usual), rank)
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    if any(isinstance(setting, str) for setting in settings):
        return None
    held = None if bias is None else _tensor(root, bias).detach()
    return prepack(quantized, held, *((*settings, found.get("groups", 1)) if rank else ()))


def _tensor(root: Any, node: Any) -> torch.Tensor:
    value = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    found: torch.Tensor = value
    return found


def _spread(value: Any, rank: int) -> Any:
    return (
        [value] * rank
        if isinstance(value, int)
        else value
        if isinstance(value, str)
        else list(value)
    )
