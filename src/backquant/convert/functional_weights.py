"""Weights that are passed to functional operators.

A weight that depends on no input is computed now: its observer sees it once more (so that it needs
no calibration, as for dynamic quantization), and in the decomposed dialect it is stored as integers
that are dequantized where they are used. One that depends on an input stays an activation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from backquant.convert.activations import needed_sites
from backquant.convert.measured import Measured, measure
from backquant.convert.state import Conversion
from backquant.graph import register_quantized_decomposed
from backquant.prepare import Role

__all__ = ["constant_value", "convert_functional_weights", "measure_functional_weights"]


def measure_functional_weights(prepared: fx.GraphModule, work: Conversion) -> dict[str, Measured]:
    """Qparams of the weight observers whose weight is constant, by head of their group."""
    found: dict[str, Measured] = {}
    values: dict[fx.Node, Any] = {}
    for site in work.prepared.sites.sites:
        if site.role is not Role.WEIGHT or site.shared:
            continue
        weight = constant_value(work.nodes[site.name].all_input_nodes[0], work.module, values)
        if weight is not None:
            observer = copy.deepcopy(prepared.get_submodule(site.name))
            with torch.no_grad():
                observer(weight)
            found[site.name] = measure(observer)
    return found


def convert_functional_weights(work: Conversion) -> set[str]:
    """Replace the observers of constant weights by integer buffers; returns their sites."""
    if work.dialect != "decomposed":
        return set()
    needed = needed_sites(work)
    values: dict[fx.Node, Any] = {}
    done: set[str] = set()
    for site in work.prepared.sites.sites:
        found = work.qparams[site.group]
        if site.role is not Role.WEIGHT or site.name not in needed or found.scale is None:
            continue
        node = work.nodes[site.name]
        source = node.all_input_nodes[0]
        weight = constant_value(source, work.module, values)
        if weight is None:
            continue
        name = str(source.target).replace(".", "_") if source.op == "get_attr" else source.name
        node.replace_all_uses_with(_stored(work, node, name, weight, found))
        work.editor.erase(node)
        done.add(site.name)
    return done


def _stored(
    work: Conversion, position: fx.Node, name: str, weight: torch.Tensor, found: Measured
) -> fx.Node:
    """Integer buffer and dequantize node, right before ``position``."""
    register_quantized_decomposed()
    ops = torch.ops.quantized_decomposed
    bounds = (found.quant_min, found.quant_max, found.storage)
    assert found.scale is not None and found.zero_point is not None
    if found.axis is None:
        qparams: tuple[Any, ...] = (found.scalar_scale, found.scalar_zero_point, *bounds)
        integers = ops.quantize_per_tensor.default(weight, *qparams)
        dequantize = ops.dequantize_per_tensor.default
    else:
        tensors = (found.scale, found.zero_point)
        rest = (found.axis, *bounds)
        integers = ops.quantize_per_channel.default(weight, *tensors, *rest)
        dequantize = ops.dequantize_per_channel.default
        qparams = (
            _buffer(work, position, f"{name}_scale_", tensors[0]),
            _buffer(work, position, f"{name}_zero_point_", tensors[1]),
            *rest,
        )
    stored = _buffer(work, position, f"{name}_quantized_", integers)
    with work.editor.graph.inserting_before(position):
        result = work.editor.graph.call_function(dequantize, (stored, *qparams))
    work.editor.provenance.record(result.name, (position.name,))
    return result


def _buffer(work: Conversion, position: fx.Node, prefix: str, tensor: torch.Tensor) -> fx.Node:
    return work.editor.read_buffer(position, work.editor.names.take(prefix), tensor)


def constant_value(
    node: fx.Node, module: fx.GraphModule, values: dict[fx.Node, Any]
) -> torch.Tensor | None:
    """The tensor that ``node`` computes if it depends on no input, else None.

    ``values`` remembers what was computed, across calls.

    >>> from torch import nn
    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = nn.Parameter(torch.ones(1))
    ...     def forward(self, x):
    ...         return x + 2 * self.w
    >>> gm = fx.symbolic_trace(Twice())
    >>> node = {n.name: n for n in gm.graph.nodes}
    >>> constant_value(node["mul"], gm, {}), constant_value(node["add"], gm, {})
    (tensor([2.]), None)
    """
    order = _producers(node)
    if order is None:
        return None
    with torch.no_grad():
        for producer in order:
            if producer not in values:
                values[producer] = _evaluate(producer, module, values)
    result = values[node]
    return result.detach() if isinstance(result, torch.Tensor) else None


def _producers(node: fx.Node) -> list[fx.Node] | None:
    """``node`` and everything it is computed from, sources first; None if an input is among it."""
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    stack: list[tuple[fx.Node, bool]] = [(node, False)]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            order.append(current)
        elif current not in done:
            if current.op == "placeholder":
                return None
            done.add(current)
            stack.append((current, True))
            stack.extend((source, False) for source in current.all_input_nodes)
    return order


def _evaluate(node: fx.Node, module: fx.GraphModule, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "get_attr":
        owner: Any = module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        return owner
    if node.op == "call_method":
        first, *rest = args
        return getattr(first, str(node.target))(*rest, **kwargs)
    call: Callable[..., Any] = (
        module.get_submodule(str(node.target)) if node.op == "call_module" else node.target  # type: ignore[assignment]
    )
    return call(*args, **kwargs)
