"""Counts the integer kernels of a lowered model, and the operators that it computes in float.

The count reads the graph only, so that it works on a model that was loaded from a file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from backquant.graph import get_module
from backquant.lower.boundaries import is_boundary
from backquant.lower.kernels.boundary import dequantize, quantize, requantize
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.operators import all_operators, find

_KERNEL_PACKAGE = "backquant.lower.kernels."
_FAMILIES = ("conv", "linear", "recurrent")


@dataclass(frozen=True)
class Audit:
    """``kernels``: how often each integer kernel runs. ``float_weighted``: the nodes that compute a
    convolution, a linear or a recurrent layer in float. ``quantize``, ``dequantize``,
    ``requantize``: how many boundaries there are. ``joined``: boundaries with nothing between them,
    which a lowering leaves nowhere."""

    kernels: dict[str, int]
    float_weighted: tuple[str, ...]
    quantize: int
    dequantize: int
    requantize: int
    joined: tuple[str, ...]

    @property
    def integer_kernels(self) -> int:
        """How many integer kernels run in one call of the model."""
        return sum(self.kernels.values())


def audit(graph_module: GraphModule) -> Audit:
    """Count kernels and boundaries of a lowered (or reference) model.

    >>> import torch
    >>> class Float(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.fc(x)
    >>> audit(torch.fx.symbolic_trace(Float())).float_weighted
    ('fc',)
    """
    kernels: Counter[str] = Counter()
    boundaries: Counter[str] = Counter()
    weighted: list[str] = []
    joined: list[str] = []
    for node in graph_module.graph.nodes:
        if is_boundary(node):
            boundaries[_boundary(node)] += 1
            source = node.args[0]
            if _boundary(node) == "quantize" and _is_dequantize(source):
                joined.append(node.name)
            continue
        name = _kernel(graph_module, node)
        if name is not None:
            kernels[name] += 1
        elif _is_float_weighted(graph_module, node):
            weighted.append(node.name)
    return Audit(
        dict(kernels),
        tuple(weighted),
        boundaries["quantize"],
        boundaries["dequantize"],
        boundaries["requantize"],
        tuple(joined),
    )


def _boundary(node: Node) -> str:
    if is_quantize(node) or node.target is quantize:
        return "quantize"
    return "requantize" if node.target is requantize else "dequantize"


def _is_dequantize(node: object) -> bool:
    return isinstance(node, Node) and (is_dequantize(node) or node.target is dequantize)


def _kernel(graph_module: GraphModule, node: Node) -> str | None:
    if node.op == "call_module":
        module = get_module(graph_module, str(node.target))
        return module.name if isinstance(module, KernelModule) else None
    if node.op != "call_function":
        return None
    home = getattr(node.target, "__module__", "") or ""
    name = getattr(node.target, "__name__", "")
    return name if home.startswith(_KERNEL_PACKAGE) else None


def _is_float_weighted(graph_module: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        module = get_module(graph_module, str(node.target))
        return any(isinstance(part, _modules()) for part in module.modules())
    known = find(node.target) if node.op == "call_function" else None
    return node.target is F.bilinear or (known is not None and known.family in _FAMILIES)


@cache
def _modules() -> tuple[type[nn.Module], ...]:
    """Those of the families, and the last three, which no record has."""
    found = [m for known in all_operators() if known.family in _FAMILIES for m in known.modules]
    return (*found, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)
