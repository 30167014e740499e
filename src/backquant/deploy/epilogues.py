"""Removes quantize/dequantize pairs between a weighted operator and the epilogue that its kernel computes.

Rule 7 of ``QDQRules``. A pair is taken out where all of this holds:

1. the value is that of a convolution or linear layer with a quantized weight, or of an epilogue that is
   already joined to one;
2. only the pair reads it, and only the epilogue reads the pair;
3. the epilogue's other inputs are dequantized values or constants.

The result is the reference model's with one rounding less.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from backquant.lower.qdq import is_dequantize, is_quantize, is_weight_dequantize
from backquant.nn.quantized import reference

_WEIGHTED = (
    reference.Conv1d,
    reference.Conv2d,
    reference.Conv3d,
    reference.ConvTranspose1d,
    reference.ConvTranspose2d,
    reference.ConvTranspose3d,
    reference.Linear,
)


def fuse_epilogues(module: fx.GraphModule, operators: tuple[Any, ...]) -> int:
    """Take out the pairs in place; returns how many.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> root = nn.Module()
    >>> root.fc = reference.Linear.from_float(nn.Linear(2, 2), {"qscheme": torch.per_tensor_affine,
    ...     "dtype": torch.qint8, "scale": 0.5, "zero_point": 0})
    >>> graph, ops = fx.Graph(), torch.ops.quantized_decomposed
    >>> value, qparams = graph.call_module("fc", (graph.placeholder("x"),)), (
    ...     0.5, 0, -128, 127, torch.int8)
    >>> for op in (ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default):
    ...     value = graph.call_function(op, (value, *qparams))
    >>> _ = graph.output(graph.call_function(torch.relu, (value,)))
    >>> made = fx.GraphModule(root, graph)
    >>> fuse_epilogues(made, (torch.relu,)), [node.name for node in made.graph.nodes]
    (1, ['x', 'fc', 'relu', 'output'])
    """
    modules, listed = dict(module.named_modules()), set(operators)
    kernels: set[fx.Node] = set()
    joined = 0
    for node in list(module.graph.nodes):
        if _is_weighted(node, modules):
            kernels.add(node)
        elif _operator(node, modules) in listed:
            joined += _join(node, kernels)
    module.graph.lint()
    module.recompile()
    return joined


def _operator(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    return type(modules[str(node.target)]) if node.op == "call_module" else node.target


def _is_weighted(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return any(isinstance(part, _WEIGHTED) for part in modules[str(node.target)].modules())
    return node.op == "call_function" and any(map(_is_weight, node.all_input_nodes[1:]))


def _is_weight(value: Any) -> bool:
    return _dequantizes(value) and value.args[0].op == "get_attr"


def _dequantizes(node: Any) -> bool:
    return _ends_pair(node) or is_weight_dequantize(node)


def _ends_pair(node: Any) -> bool:
    return is_dequantize(node) or str(node.target) == "backquant.dequantize_float8.default"


def _join(node: fx.Node, kernels: set[fx.Node]) -> int:
    """Take out the first pair before ``node`` that may go; ``node`` then belongs to the kernel."""
    values = node.all_input_nodes
    if any(value in kernels and len(value.users) == 1 for value in values):
        kernels.add(node)
        return 0
    if not all(_dequantizes(value) or value.op == "get_attr" for value in values):
        return 0
    for value in values:
        source = _single_source(value)
        if source is None or source not in kernels:
            continue
        quantize: Any = value.args[0]
        node.replace_input_with(value, source)
        for done in (value, quantize):
            done.graph.erase_node(done)
        kernels.add(node)
        return 1
    return 0


def _starts_pair(node: fx.Node) -> bool:
    return is_quantize(node) or str(node.target) == "backquant.quantize_float8.default"


def _single_source(value: fx.Node) -> fx.Node | None:
    """What the pair that ends in ``value`` reads, if nothing else reads it or the pair."""
    quantize = value.args[0] if _ends_pair(value) else None
    if not isinstance(quantize, fx.Node) or not _starts_pair(quantize):
        return None
    source = quantize.args[0]
    assert isinstance(source, fx.Node)
    alone = all(len(part.users) == 1 for part in (value, quantize, source))
    return source if alone else None
