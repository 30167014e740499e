"""torch's own graph interpreter, from the text form of a graph.

What this takes is private to torch and stands here alone. Where a version of torch lacks it, models run
without recordings: ``Replays.refused`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backquant.graph import interception

_NEEDED = (
    "FloatType",
    "TensorType",
    "_create_function_from_graph",
    "_get_graph_executor_optimize",
    "_jit_pass_constant_propagation",
    "_set_graph_executor_optimize",
    "parse_ir",
)
_missing = ", ".join(f"torch._C.{name}" for name in _NEEDED if not hasattr(torch._C, name))


def unavailable() -> str:
    """Why nothing can be recorded with this version of torch; empty if it can."""
    lacking = _missing or interception.missing
    return lacking and f"torch {torch.__version__} has no {lacking}: calls are not recorded"


def interpreted(source: str, embedded: list[Any]) -> Callable[..., Any]:
    """The function of the graph ``source``, whose last inputs are the constants ``embedded``.

    >>> text = "graph(%x : Tensor, %y : Tensor):\\n  %z : Tensor = aten::mul(%x, %y)\\n  return (%z)"
    >>> interpreted(text, [torch.tensor(2.0)])(torch.tensor(3.0))
    tensor(6.)
    """
    graph = torch._C.parse_ir(source)
    _embed(graph, embedded)
    torch._C._jit_pass_constant_propagation(graph)
    made: Callable[..., Any] = torch._C._create_function_from_graph("forward", graph)
    return made


def run_as_written(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    """Call what ``interpreted`` made, without the optimisations of torch's executor.

    What ``torch.jit.optimized_execution`` does, which takes several times as long.
    """
    setting: Any = torch._C
    before = setting._get_graph_executor_optimize()
    setting._set_graph_executor_optimize(False)
    try:
        return function(*tensors)
    finally:
        setting._set_graph_executor_optimize(before)


def _embed(graph: Any, values: list[Any]) -> None:
    """The last inputs of ``graph`` become constants."""
    if not values:
        return
    first = next(iter(graph.nodes()))
    graph.setInsertPoint(first)
    places = list(enumerate(graph.inputs()))
    for value in reversed(values):
        place, parameter = places.pop()
        parameter.replaceAllUsesWith(_constant(graph, value, first))
        graph.eraseInput(place)


def _constant(graph: Any, value: Any, first: Any) -> Any:
    if isinstance(value, (torch.ScriptObject, torch.device, str)):
        return graph.insertConstant(value)
    node = graph.create("prim::Constant")
    if isinstance(value, torch.Tensor):
        node.t_("value", value.detach())
        node.output().setType(torch._C.TensorType.get())
    else:
        node.f_("value", value)
        node.output().setType(torch._C.FloatType.get())
    node.insertBefore(first)
    return node.output()
