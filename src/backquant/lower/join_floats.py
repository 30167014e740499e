"""A convolution or linear layer that float operators read gives floats itself.

The reference model rounds its result to integers and dequantizes them; the kernel keeps the value that
it has before it rounds, which is nearer to the float model's. They differ by half an integer step at
most, but for values that the reference model cuts off. What leaves the model is rounded as in the
reference model. The record of the kernel says ``rounds once`` and its dtype is float32.

Between the two there may be operators that only show the value in another shape: they are views.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from backquant.lower.kernels.boundary import dequantize
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.rule import KernelUse

__all__ = ["join_floats"]

_Kernel = OnednnConv | OnednnLinear
_VIEWS: frozenset[object] = frozenset(
    {
        "reshape", "view", "permute", "transpose", "unbind", "chunk", "split", "squeeze",
        "unsqueeze", "flatten", "unflatten", "select", "narrow", "expand", "movedim", "swapaxes",
        torch.reshape, torch.permute, torch.transpose, torch.unbind, torch.chunk, torch.split,
        torch.squeeze, torch.unsqueeze, torch.flatten, torch.unflatten, torch.select, torch.narrow,
        torch.movedim, torch.swapaxes, operator.getitem,
    }
)  # fmt: skip
_SIZES: frozenset[object] = frozenset({"size", "dim", getattr})


def join_floats(
    graph_module: GraphModule, kernels: Sequence[KernelUse | None], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Join what can be; returns the records of ``kernels`` after that.

    ``records``: the position in ``kernels`` of the record of each kernel node. Each kernel module must
    be called once. The graph is edited in place.

    >>> join_floats(torch.fx.symbolic_trace(torch.nn.Identity()), [], {})
    []
    """
    found = list(kernels)
    for node in list(graph_module.graph.nodes):
        kernel = _kernel(graph_module, node)
        readers = None if kernel is None else _dequantized(node)
        if kernel is None or not readers:
            continue
        made = _in_float(kernel)
        graph_module.add_submodule(str(node.target), made)
        for reader in readers:
            reader.replace_all_uses_with(reader.all_input_nodes[0])
            graph_module.graph.erase_node(reader)
        before = found[records[node]] if node in records else None
        if before is not None:
            changed = dataclasses.replace(before, kernel=made.name, dtype=torch.float32)
            found[records[node]] = changed
    return found


def _kernel(graph_module: GraphModule, node: Node) -> _Kernel | None:
    if node.op != "call_module" or not node.users:
        return None
    module = graph_module.get_submodule(str(node.target))
    if not isinstance(module, (OnednnConv, OnednnLinear)):
        return None
    return module if module.config.out_dtype == torch.uint8 else None


def _dequantized(node: Node) -> list[Node] | None:
    """The dequantize nodes that read ``node``, through views or not; ``None`` if others do, too."""
    found: list[Node] = []
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user.op == "call_function" and user.target is dequantize:
            if any(reader.op == "output" for reader in user.users):
                return None
            found.append(user)
        elif user.op in ("call_function", "call_method") and user.target in _VIEWS:
            waiting += user.users
        elif user.target not in _SIZES:
            return None
    return list(dict.fromkeys(found))


def _in_float(kernel: _Kernel) -> _Kernel:
    changed = dataclasses.replace(
        kernel.config, out_scale=1.0, out_zero_point=0, out_dtype=torch.float32, rounds_once=True
    )
    tensors = WeightTensors(
        kernel.weight, kernel.weight_scale, kernel.weight_zero_point, kernel.bias
    )
    made = type(kernel)(changed, tensors)  # type: ignore[arg-type]  # its own configuration's class
    made.train(kernel.training)
    return made
