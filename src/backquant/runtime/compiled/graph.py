"""From a lowered graph to one that can be compiled: the same nodes, kernels spelled anew."""

from __future__ import annotations

import torch
from torch import fx

from backquant.errors import EngineError
from backquant.graph import copied_graph, get_module, set_module
from backquant.graph.requantize import register_quantized_decomposed
from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.norm import BatchNorm
from backquant.runtime.compiled.functions import INPUT, SPELLINGS
from backquant.runtime.compiled.modules import spelled
from backquant.runtime.compiled.operators import NARROW

_KERNELS = "backquant.lower.kernels."


def compilable(lowered: fx.GraphModule, float_dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A graph module with a graph of its own that shares weights with ``lowered``, which is not changed.

    ``float_dtype``: bfloat16 for attention and products of activations in it.

    Raises ``EngineError`` with the kernels that there is no spelling for.

    >>> from torch import nn
    >>> compilable(fx.symbolic_trace(nn.Sequential(nn.ReLU()))).graph.find_nodes(op="call_module")
    [_0]
    """
    register_quantized_decomposed()
    spellings = SPELLINGS if float_dtype == torch.float32 else {**SPELLINGS, **NARROW}
    made = fx.GraphModule(lowered, copied_graph(lowered.graph))
    _read_parts(made)
    missing: list[str] = []
    done: set[str] = set()
    for node in made.graph.nodes:
        if node.op == "call_module" and node.target not in done:
            done.add(node.target)
            kernel = get_module(made, str(node.target))
            if isinstance(kernel, KernelModule):
                module = spelled(kernel)
                if module is None:
                    missing.append(f"{node.name} ({kernel.name})")
                else:
                    set_module(made, str(node.target), module)
        elif node.op == "call_function" and node.target in spellings:
            node.target = INPUT if _is_input(node) else spellings[node.target]
        elif getattr(node.target, "__module__", "").startswith(_KERNELS):
            missing.append(f"{node.name} ({node.target.__name__})")
    if missing:
        raise EngineError(
            f"{len(missing)} kernels cannot be compiled: {', '.join(missing[:5])}",
            where="QuantizedModel.compile",
            fix="call the model as it is: quantized(x); it runs on the same integers",
        )
    made.recompile()
    return made


def _read_parts(graph_module: fx.GraphModule) -> None:
    """Batch norms that alone read what is joined read its parts."""
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.cat):
        user = next(iter(node.users), None)
        if len(node.users) != 1 or user is None or user.op != "call_module":
            continue
        norm = get_module(graph_module, str(user.target))
        along_channels = len(node.args) == 2 and node.args[1] == 1
        if isinstance(norm, BatchNorm) and norm.config.dims == 2 and along_channels:
            user.args = tuple(node.args[0])
            graph_module.graph.erase_node(node)


def _is_input(node: fx.Node) -> bool:
    """Whether a node quantizes an input of the model, to all 256 integers."""
    source = node.args[0]
    full_range = node.target is quantize and tuple(node.args[3:]) == (0, 255, torch.uint8)
    return full_range and isinstance(source, fx.Node) and source.op == "placeholder"
