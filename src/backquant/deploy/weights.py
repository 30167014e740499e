"""Weights of reference modules as nodes: integers and a dequantize node, which every target reads.

A reference module dequantizes its weight by arithmetic; here a copy of it does so by
``quantized_decomposed`` operators. Float16 weights, those whose zero points are floats, and narrow floats
with several scales have no such operator and stay arithmetic.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from backquant.dtypes import is_scaled_float
from backquant.graph import register_blocks, register_float8, register_quantized_decomposed
from backquant.nn.quantized.reference.integer_weights import IntegerWeights


class _Emitter:
    """Stands in for ``IntegerWeights._dequantized`` of one module; ``weights`` as in ``QDQRules``."""

    def __init__(self, module: IntegerWeights, weights: str) -> None:
        self._module = module
        self._from_float = weights == "quantized_float"

    def __call__(self, name: str) -> torch.Tensor:
        module: Any = self._module
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale")
        zero_point = getattr(module, f"{name}_zero_point")
        scheme = getattr(module, f"{name}_qscheme")
        if scheme is not None and is_scaled_float(weight.dtype) and scale.dim() == 0:
            [literal, _] = module.__dict__[f"_{name}_literals"]
            return torch.ops.backquant.dequantize_float8(weight, literal)  # type: ignore[no-any-return]
        if scheme is None or weight.is_floating_point() or zero_point.is_floating_point():
            return type(module)._dequantized(module, name)  # type: ignore[no-any-return]
        bounds = (
            getattr(module, f"{name}_quant_min"),
            getattr(module, f"{name}_quant_max"),
            weight.dtype,
        )
        if scale.dim() > 1:
            return torch.ops.backquant.dequantize_blocks(weight, scale, zero_point)  # type: ignore[no-any-return]
        ops = torch.ops.quantized_decomposed
        if scale.dim() == 0:
            qparams = (*module.__dict__[f"_{name}_literals"], *bounds)
            quantize, dequantize = ops.quantize_per_tensor, ops.dequantize_per_tensor
        else:
            qparams = (scale, zero_point, getattr(module, f"{name}_axis"), *bounds)
            quantize, dequantize = ops.quantize_per_channel, ops.dequantize_per_channel
        if self._from_float:
            weight = quantize.default(getattr(module, f"{name}_float"), *qparams)
        return dequantize.default(weight, *qparams)  # type: ignore[no-any-return]


def with_weight_nodes(module: nn.Module, weights: str = "integer") -> nn.Module:
    """A copy of ``module`` and its children that dequantizes weights by operators; tensors are shared.

    ``weights``: ``"integer"``, or ``"quantized_float"``: from floats, which are quantized by a node.
    Graph modules inside become copies over their copied children.

    >>> from backquant.nn.quantized.reference import Linear
    >>> linear = Linear.from_float(nn.Linear(2, 2), {"qscheme": torch.per_tensor_affine,
    ...     "dtype": torch.qint8, "scale": 0.5, "zero_point": 0})
    >>> torch.equal(with_weight_nodes(linear)(torch.ones(1, 2)), linear(torch.ones(1, 2)))
    True
    """
    register_quantized_decomposed()
    register_float8()
    register_blocks()
    children = {
        name: None if child is None else with_weight_nodes(child, weights)
        for name, child in module._modules.items()
    }
    if isinstance(module, fx.GraphModule):
        return _same_graph(module, children)
    made = copy.copy(module)
    made._modules = children
    if isinstance(made, IntegerWeights):
        _prepare(made, weights)
    return made


def _same_graph(module: fx.GraphModule, children: dict[str, nn.Module | None]) -> fx.GraphModule:
    """A graph module over ``children``, whose graph is a copy with the same names."""
    root = nn.Module()
    root.__dict__.update({k: v for k, v in module.__dict__.items() if not k.startswith("_graph")})
    root._modules = children
    graph = fx.Graph()
    graph.set_codegen(module.graph._codegen)
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    made = fx.GraphModule(root, graph)
    made.training = module.training
    return made


def _prepare(module: Any, weights: str) -> None:
    module._buffers = dict(module._buffers)
    for name in module.weight_names:
        scale, zero_point = module._buffers[f"{name}_scale"], module._buffers[f"{name}_zero_point"]
        if scale.dim() == 0:
            module.__dict__[f"_{name}_literals"] = (float(scale), int(zero_point))
        if weights == "quantized_float":
            module._buffers[f"{name}_float"] = type(module)._dequantized(module, name).detach()
    module.__dict__["_dequantized"] = _Emitter(module, weights)
