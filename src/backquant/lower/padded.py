"""Convolutions that pad with values of their input: the padded values are quantized as the input is.

Kernels pad with zeros, as much on one side as on the other; targets with zeros alone. Other paddings are an
operator before them, and between a dequantize node and a convolution that would be float arithmetic.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from backquant.graph.edit import NamePool, get_module, weighted_part
from backquant.lower.qdq import is_dequantize


def pad_before(module: fx.GraphModule, for_kernels: bool = False) -> None:
    """Write the padding of such convolutions as nodes, in place; what is padded is quantized again, exactly.

    Modules that it changes are copied. ``for_kernels``: of integer weights alone, and of ``"same"`` that pads
    more behind than in front, too.

    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> graph = fx.Graph()
    >>> q, op = graph.placeholder("q"), torch.ops.quantized_decomposed.dequantize_per_tensor.default
    >>> x = graph.call_function(op, (q, 0.1, 0, 0, 255, torch.uint8))
    >>> _ = graph.output(graph.call_module("conv", (x,)))
    >>> conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
    >>> module = fx.GraphModule({"conv": conv}, graph)
    >>> pad_before(module)
    >>> [node.op for node in module.graph.nodes].count("call_function"), module.conv_padded_0.padding
    (6, (0,))
    """
    pool = NamePool(module)
    done = False
    for node in list(module.graph.nodes):
        if node.op != "call_module" or not node.args:
            continue
        called, given = get_module(module, str(node.target)), node.args[0]
        found = _convolution(called, for_kernels)
        if found is None or not isinstance(given, fx.Node) or not is_dequantize(given):
            continue
        done = True
        path = pool.take(f"{str(node.target).replace('.', '_')}_padded_")
        module.add_module(path, _without_padding(called, found))
        with module.graph.inserting_before(node):
            again = _requantized(
                module.graph, given, _padded(module.graph, given, found, for_kernels)
            )
        node.args = (again, *node.args[1:])
        node.target = path
    if done:
        module.recompile()


def _convolution(called: nn.Module, for_kernels: bool) -> _ConvNd | None:
    """The convolution that a module is, or begins with, if its padding is to be written before it."""
    first = weighted_part(called)
    if not isinstance(first, _ConvNd) or isinstance(first, _ConvTransposeNd):
        return None
    if for_kernels and first.weight.is_floating_point():
        return None
    is_uneven = for_kernels and first.padding == "same" and _is_uneven(first)
    return first if is_uneven or first.padding_mode != "zeros" else None


def _is_uneven(conv: _ConvNd) -> bool:
    pads = conv._reversed_padding_repeated_twice
    return pads[::2] != pads[1::2]


def _without_padding(called: nn.Module, found: _ConvNd) -> nn.Module:
    bare = copy.copy(found)
    bare.padding, bare.padding_mode = (0,) * len(found.kernel_size), "zeros"
    if called is found:
        return bare
    made = copy.copy(called)
    made._modules = {**called._modules, next(iter(called._modules)): bare}
    return made


def _padded(graph: fx.Graph, given: fx.Node, conv: _ConvNd, for_kernels: bool) -> fx.Node:
    """``given`` as ``conv`` pads it; for targets circles are concatenations: OpenVINO cannot pad so."""
    pads, mode = tuple(conv._reversed_padding_repeated_twice), conv.padding_mode
    if for_kernels or mode != "circular":
        name = "constant" if mode == "zeros" else mode
        return graph.call_function(F.pad, (given, pads, name))
    for axis, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True), 1):
        parts = [given]
        if before:
            parts.insert(0, _slice(graph, given, axis, slice(-before, None)))
        if after:
            parts.append(_slice(graph, given, axis, slice(None, after)))
        if len(parts) > 1:
            given = graph.call_function(torch.cat, (parts, -axis))
    return given


def _slice(graph: fx.Graph, given: fx.Node, axis: int, part: slice) -> fx.Node:
    """A part of ``given`` along an axis that is counted from the last."""
    index: Any = (..., part, *[slice(None)] * (axis - 1))
    return graph.call_function(operator.getitem, (given, index))


def _requantized(graph: fx.Graph, given: fx.Node, padded: fx.Node) -> fx.Node:
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    integers = graph.call_function(quantize, (padded, *given.args[1:]))
    return graph.call_function(given.target, (integers, *given.args[1:]), given.kwargs)  # type: ignore[arg-type]
