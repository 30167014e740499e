"""The scales and zero points of a lowered model, by the names of what its kernels replaced."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from backquant.graph import get_module
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.kernels.lookup import Lookup
from backquant.lower.rule import KernelUse
from backquant.match.plan import Plan

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
