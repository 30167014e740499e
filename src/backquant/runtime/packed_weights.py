"""Weights of functional layers in PyTorch's quantized dialect: objects of its engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_KINDS: dict[Any, tuple[str, int]] = {
    F.linear: ("linear", 0),
    F.conv1d: ("conv1d", 1),
    F.conv2d: ("conv2d", 2),
    F.conv3d: ("conv3d", 3),
    F.conv_transpose1d: ("conv_transpose1d", 1),
    F.conv_transpose2d: ("conv_transpose2d", 2),
    F.conv_transpose3d: ("conv_transpose3d", 3),
}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_ARGUMENTS[:5], "output_padding", "groups", "dilation")
_STORED = tuple(
    f"quantized_decomposed.dequantize_per_{kind}.default" for kind in ("channel", "tensor")
)


@dataclass
class PackedWeight:
    """A weight as plain tensors, and what an engine of PyTorch makes of it when it is first read.

    The engine's object cannot be pickled; this can.
    """

    kind: str
    integers: torch.Tensor
    scale: Any
    zero_point: Any
    axis: int | None
    bias: torch.Tensor | None
    settings: tuple[Any, ...]
    packing: Callable[[], AbstractContextManager[Any]] = nullcontext
    names: tuple[str, str] = ("", "")  # of the attributes with scale and zero point, in PyTorch
    _packed: Any = None

    def packed(self) -> Any:
        """The engine's object."""
        if self._packed is None:
            half = self.integers.is_floating_point()
            prepack = getattr(torch.ops.quantized, f"{self.kind}_prepack{'_fp16' if half else ''}")
            weight = self.integers.float() if half else self._quantized()
            with self.packing():
                self._packed = prepack(weight, self.bias, *self.settings)
        return self._packed

    def attributes(self) -> dict[str, torch.Tensor]:
        """Scale and zero point by their names."""
        values = torch.as_tensor(self.scale), torch.as_tensor(self.zero_point)
        return dict(zip(self.names, values, strict=True))

    def _quantized(self) -> torch.Tensor:
        if self.axis is None:
            make = torch._make_per_tensor_quantized_tensor
            return make(self.integers, self.scale, self.zero_point)
        scales, zero_points = self.scale.double(), self.zero_point.long()
        per_channel = torch._make_per_channel_quantized_tensor
        return per_channel(self.integers, scales, zero_points, self.axis)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


def functional_name(node: fx.Node) -> str:
    """The word of ``torch.ops.quantized`` for a functional layer; empty where there is none.

    >>> functional_name(fx.symbolic_trace(lambda x, w: F.linear(x, w)).graph.find_nodes(
    ...     op="call_function", target=F.linear)[0])
    'linear'
    """
    return _KINDS.get(node.target, ("", 0))[0] if node.op == "call_function" else ""


def packed_weight(root: Any, node: fx.Node) -> PackedWeight | None:
    """The constant weight and bias of ``node``; ``None`` where they are others, or settings are words."""
    kind, rank = _KINDS[node.target]
    transposed = kind.startswith("conv_transpose")
    names = _TRANSPOSED if transposed else _ARGUMENTS
    called: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight, bias = called.get("weight"), called.get("bias")
    if not isinstance(weight, fx.Node) or str(weight.target) not in _STORED:
        return None
    stored = weight.args[0]
    if not isinstance(stored, fx.Node) or stored.op != "get_attr":
        return None
    if isinstance(bias, fx.Node) and bias.op != "get_attr":
        return None
    integers = _tensor(root, stored)
    usual = [("stride", 1), ("padding", 0), ("dilation", 1)][: 3 * rank]
    if transposed:
        usual.insert(2, ("output_padding", 0))
    settings = [called.get(name, default) for name, default in usual]
    if integers.dtype != torch.int8 or any(isinstance(value, str) for value in settings):
        return None
    spread = [[v] * rank if isinstance(v, int) else list(v) for v in settings]
    scale, zero_point = weight.args[1:3]
    axis: Any = None
    if "per_channel" in str(weight.target):
        if transposed:
            return None
        scale, zero_point, axis = _tensor(root, scale), _tensor(root, zero_point), weight.args[3]
    held = None if bias is None else _tensor(root, bias).detach()
    groups = [called.get("groups", 1)] if rank else []
    return PackedWeight(kind, integers, scale, zero_point, axis, held, (*spread, *groups))


def _tensor(root: Any, node: Any) -> torch.Tensor:
    value = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    tensor: torch.Tensor = value
    return tensor
