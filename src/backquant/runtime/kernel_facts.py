"""What the kernels of a lowered graph are: their scales by name, and how many of them compute in integers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from backquant.graph import get_module
from backquant.lower.kernels.boundary import dequantize, quantize, requantize
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.lookup import Lookup
from backquant.lower.lowering import is_boundary
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.lower.rule import KernelUse
from backquant.match.plan import Plan
from backquant.operators import all_operators, find

# The scales and zero points of a lowered model, by the names of what its kernels replaced.

_LOWERED = "_lowered"


class KernelQParams(NamedTuple):
    """What the integers that a kernel reads and gives stand for: ``(scale, zero_point)``.

    ``inputs`` has an entry per integer input; ``output`` is ``None`` for a kernel that gives floats, or
    keeps the qparams of its input.
    """

    inputs: tuple[tuple[float, int], ...]
    output: tuple[float, int] | None


def qparams_by_name(
    graph_module: GraphModule, plan: Plan, kernels: Iterable[KernelUse] = ()
) -> dict[str, KernelQParams]:
    """The qparams of each kernel by the names of the nodes that it runs for and, where no other kernel runs
    for the module of the first of them, by the path of that module, too.
    """
    found: dict[str, KernelQParams] = {}
    inside: dict[str, list[KernelQParams]] = {}
    nodes = {use.nodes[-1]: use.nodes for use in kernels}
    for node in graph_module.graph.nodes:
        if not node.op.startswith("call_") or not node.name.endswith(_LOWERED):
            continue
        qparams = kernel_qparams(graph_module, node)
        if qparams is None:
            continue
        name = node.name.removesuffix(_LOWERED)
        names = nodes.get(name, (name,))
        found.update(dict.fromkeys(names, qparams))
        decision = plan.decisions.get(names[0])
        path = "" if decision is None else decision.module_path
        inside.setdefault(path, []).append(qparams)
    for path, of_kernels in inside.items():
        if path and len(of_kernels) == 1:
            found[path] = of_kernels[0]
    return found


def kernel_qparams(graph_module: GraphModule, node: Node) -> KernelQParams | None:
    """What the integers of one kernel stand for; ``None`` for what reads and gives none.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.Identity())
    >>> kernel_qparams(graph_module, next(iter(graph_module.graph.nodes))) is None
    True
    """
    return _of(_settings(graph_module, node))


def _settings(graph_module: GraphModule, node: Node) -> Mapping[str, Any]:
    """The numbers of a kernel by name: from its configuration, or from the arguments of its call."""
    if node.op == "call_module":
        module = get_module(graph_module, str(node.target))
        if isinstance(module, Lookup) and module.config.post_op == "none":
            return {}  # a lookup table has no scale
        return vars(module.config) if isinstance(module, KernelModule) else {}
    home = getattr(node.target, "__module__", None) or ""
    if node.op != "call_function" or not home.startswith("backquant.lower.kernels."):
        return {}
    target: Any = node.target
    return inspect.signature(target).bind(*node.args, **node.kwargs).arguments


def _of(settings: Mapping[str, Any]) -> KernelQParams | None:
    inputs = tuple(_pairs(settings, ("", "x_", "y_", "other_")))
    output = next(_pairs(settings, ("out_",)), None)
    if settings.get("out_dtype") is not None and settings["out_dtype"].is_floating_point:
        output = None
    return KernelQParams(inputs, output) if inputs or output else None


def _pairs(settings: Mapping[str, Any], prefixes: tuple[str, ...]) -> Iterator[tuple[float, int]]:
    for prefix in prefixes:
        scale = settings.get(f"{prefix}scale")
        if scale is not None:
            yield scale, settings[f"{prefix}zero_point"]


# Counts the integer kernels of a lowered model, and the operators that it computes in float.
#
# The count reads the graph only, so that it works on a model that was loaded from a file.

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
