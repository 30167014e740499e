"""Which value of the float graph each value of a quantized graph stands for, and as which integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backquant.dtypes import QParams, TensorQParams, quantize_tensor
from backquant.graph import register_quantized_decomposed
from backquant.lower.kernels.boundary import quantize, requantize
from backquant.runtime import QuantizedModel
from backquant.runtime.kernel_qparams import kernel_qparams

_LOWERED = "_lowered"


@dataclass(frozen=True)
class Point:
    """A value of the quantized graph that can be compared.

    ``node``: of the quantized graph. ``value``: the node of the float graph that it stands for.
    ``qparams``: of its integers; ``None`` where it is a float, or the tensor itself says it.
    ``operators``: what was computed by this node, by name. ``rounds``: it only makes integers of a float.
    """

    node: str
    value: str
    qparams: QParams | None
    operators: tuple[str, ...]
    kernel: str = ""
    rounds: bool = False


def points_of(quantized: QuantizedModel, float_graph: fx.GraphModule) -> tuple[Point, ...]:
    """Where the two graphs can be compared, in the order of the quantized one.

    1. A kernel stands for the last of the operators that it replaced; a node that was not replaced for the
       node of its name.
    2. What makes integers of a value stands for that value.
    3. Integers have the qparams of their kernel; what has none of its own keeps those of what it reads.
    """
    return tuple(_Points(quantized, float_graph).found())


class _Points:
    def __init__(self, quantized: QuantizedModel, float_graph: fx.GraphModule) -> None:
        register_quantized_decomposed()
        self.gm = quantized.graph_module
        self.known = {node.name for node in float_graph.graph.nodes}
        self.uses = {name: use for use in quantized.kernels for name in use.nodes}
        record = quantized.record
        self.sites = {
            site.producer: record.qparams[site.name]
            for site in record.sites.sites
            if site.producer and site.name in record.qparams
        }
        # With the number of arguments before the qparams of what they give.
        self.rounding: dict[Any, int] = {
            quantize: 1,
            torch.ops.quantized_decomposed.quantize_per_tensor.default: 1,
            requantize: 3,
        }
        self.qparams: dict[fx.Node, QParams | None] = {}
        self.stands_for: dict[fx.Node, str] = {}

    def found(self) -> Iterator[Point]:
        for node in self.gm.graph.nodes:
            if node.op in ("get_attr", "output"):
                continue
            point = self._point(node)
            if point is None:
                self.qparams[node] = self._inherited(node)
                continue
            self.qparams[node], self.stands_for[node] = point.qparams, point.value
            if node.op != "placeholder":
                yield point

    def _point(self, node: fx.Node) -> Point | None:
        if node.op == "call_function" and node.target in self.rounding:
            return self._rounded(node)
        name = node.name.removesuffix(_LOWERED)
        use = self.uses.get(name)
        value = use.nodes[-1] if use is not None else name
        if value not in self.known:
            return None
        operators = use.nodes if use is not None else (name,)
        kernel = "" if use is None else use.kernel
        return Point(node.name, value, self._own(node, value), operators, kernel)

    def _rounded(self, node: fx.Node) -> Point | None:
        source = node.args[0]
        value = self.stands_for.get(source, "") if isinstance(source, fx.Node) else ""
        literals: Any = node.args[self.rounding[node.target] :]
        qparams = QParams(*literals)
        self.qparams[node] = qparams
        return Point(node.name, value, qparams, (value,), rounds=True) if value else None

    def _own(self, node: fx.Node, value: str) -> QParams | None:
        """The qparams as measured; a loaded model does not have these, but its kernels have them."""
        site = self.sites.get(value)
        if site is not None and site.scale is not None and site.scale.numel() == 1:
            return site.number
        found = kernel_qparams(self.gm, node)
        if found is None:
            is_table = node.name.endswith(_LOWERED) and node.op == "call_module"
            return None if is_table else self._inherited(node)
        pair = found.output or (found.inputs[0] if found.inputs else None)
        return None if pair is None else QParams(float(pair[0]), int(pair[1]), 0, 0, torch.uint8)

    def _inherited(self, node: fx.Node) -> QParams | None:
        known = (self.qparams.get(source) for source in node.all_input_nodes)
        return self.qparams.get(node) or next((q for q in known if q is not None), None)


def as_float(x: torch.Tensor, qparams: QParams | None) -> torch.Tensor | None:
    """A value of the quantized graph as the floats that it stands for; ``None`` where that is not known.

    >>> as_float(torch.tensor([3], dtype=torch.uint8), QParams(0.5, 1, 0, 255, torch.uint8))
    tensor([1.])
    """
    if x.is_quantized:
        return x.dequantize()
    if x.is_floating_point():
        return x
    if qparams is None or x.dtype == torch.bool:
        return None
    return (x.float() - qparams.zero_point) * qparams.scale


def represented(x: torch.Tensor, like: torch.Tensor, qparams: QParams | None) -> torch.Tensor:
    """The float ``x`` in the form that ``like`` has: a float, plain integers, a quantized tensor.

    >>> qparams = QParams(0.5, 1, 0, 255, torch.uint8)
    >>> represented(torch.tensor([1.0]), torch.tensor([0], dtype=torch.uint8), qparams)
    tensor([3], dtype=torch.uint8)
    """
    if like.is_quantized:
        if like.qscheme() != torch.per_tensor_affine:
            return like
        return torch.quantize_per_tensor(x, like.q_scale(), like.q_zero_point(), like.dtype)
    if like.is_floating_point():
        made = x.to(like.dtype)
    else:
        assert qparams is not None
        made = quantize_tensor(x.float(), _for(like, qparams))
    return torch.empty_like(like).copy_(made)


def _for(x: torch.Tensor, qparams: QParams) -> TensorQParams:
    """``qparams`` in the dtype that the integers have; its whole range where none is known."""
    low, high = qparams.quant_min, qparams.quant_max
    info = torch.iinfo(x.dtype)
    if low >= high or low < info.min or high > info.max:
        low, high = info.min, info.max
    scale = torch.tensor(qparams.scale, device=x.device)
    zero_point = torch.tensor(qparams.zero_point, device=x.device)
    return QParams(scale, zero_point, low, high, x.dtype)
