"""Multiply-adds per node, and which nodes give no tensor: measured by running the graph once.

Each operator that PyTorch dispatches while a node runs is counted to that node, also those inside of
modules that are one node (an attention layer, an untraced module) and of custom operators written in
Python. What cannot be counted is named: its count is unknown, not 0.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from backquant.graph.arguments import signature_of
from backquant.graph.clone import own_buffers
from backquant.graph.dispatch_mode import DispatchMode
from backquant.graph.example import as_arguments
from backquant.graph.multiply_adds import FORMULAS, has_no_formula
from backquant.graph.objects import fresh

_CALLS = ("call_module", "call_function", "call_method")
_PYTORCH = frozenset({"aten", "prims", "prim"})
# namespaces of quantize and dequantize operators, which do no multiply-adds
_FREE = frozenset({"quantized_decomposed", "backquant"})
# types of values that are no tensors and contain none
_SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    type,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


@dataclass(frozen=True)
class GraphCosts:
    """What one run of a graph has shown of its nodes, by name.

    ``multiply_adds``: those of each node that has any. ``uncounted``: the operators in a node whose
    multiply-adds are not known. ``bookkeeping``: the nodes whose value is no tensor and holds none (sizes,
    dtypes, comparisons of such, assertions), and those that take a tuple or another container apart.
    ``total``: multiply-adds of the model that the graph was captured from, 0 if it was not run.
    ``not_counted``: why the graph was not run, else empty.
    """

    multiply_adds: Mapping[str, int] = field(default_factory=dict)
    uncounted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bookkeeping: frozenset[str] = frozenset()
    total: int = 0
    not_counted: str = ""


class MultiplyAdds(DispatchMode):
    """Counts while it is active: ``count``, and in ``unknown`` the operators that it cannot count.

    >>> with MultiplyAdds() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.count, counter.unknown
    (24, [])
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.unknown: list[str] = []
        self._seen = 0

    def take(self) -> tuple[int, tuple[str, ...]]:
        """What was counted since it was last asked."""
        found = self.count, tuple(dict.fromkeys(self.unknown))
        self.count, self.unknown = 0, []
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        self._seen += _computes(func)
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        formula = FORMULAS.get(func.overloadpacket)
        if formula is not None:
            return self._counted(func, formula, args, kwargs)
        if func.namespace in _FREE:
            return func(*args, **kwargs)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.namespace not in _PYTORCH:
            return self._inside(func, args, kwargs)
        if has_no_formula(func.overloadpacket):
            self.unknown.append(str(func.overloadpacket))
        return func(*args, **kwargs)

    def _counted(self, func: Any, formula: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        named = {**kwargs, "out": out}
        try:
            self.count += formula(*args, **named)
        except Exception:  # shapes that the formula does not handle, for example of nested tensors
            self.unknown.append(str(func.overloadpacket))
        return out

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A custom operator: counted by what its own kernel calls, if that can be seen."""
        if not any(_holds_floats(value) for value in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        before, cpu = self._seen, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        name = func.name()
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        if not has_kernel or not _all_on_cpu((args, kwargs)):
            out = func(*args, **kwargs)
        else:
            with self:
                out = func.redispatch(cpu, *args, **kwargs)
        if self._seen == before and any(_holds_floats(value) for value in tree_leaves(out)):
            self.unknown.append(str(func.overloadpacket))
        return out

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is torch.ops.higher_order.cond:
            predicate, if_true, if_false, operands = args
            with self:
                return (if_true if predicate else if_false)(*operands)
        self.unknown.append(str(func))
        return func(*args, **kwargs)


def _computes(func: Any) -> bool:
    """Whether an operator does more than look at a tensor or make room for one."""
    is_operator = isinstance(func, torch._ops.OpOverload)
    return not is_operator or not (func.is_view or "empty" in func._schema.name)


def _holds_floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _all_on_cpu(values: Any) -> bool:
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _is_bookkeeping(value: Any) -> bool:
    return all(isinstance(leaf, _SCALARS) for leaf in tree_leaves(value))


class _Runner(Interpreter):
    """Notes for each node what it counted and whether its value holds tensors."""

    def __init__(self, module: GraphModule, counter: MultiplyAdds) -> None:
        super().__init__(module)
        self.counter = counter
        self.counts: dict[str, int] = {}
        self.uncounted: dict[str, tuple[str, ...]] = {}
        self.bookkeeping: set[str] = set()

    def run_node(self, n: Node) -> Any:
        if n.op not in _CALLS:
            return super().run_node(n)
        with self.counter:
            result = super().run_node(n)
        count, unknown = self.counter.take()
        if count:
            self.counts[n.name] = count
        if unknown:
            self.uncounted[n.name] = unknown
        if _is_bookkeeping(result) or self._is_part_of_tuple(n):
            self.bookkeeping.add(n.name)
        return result

    def _is_part_of_tuple(self, n: Node) -> bool:
        if n.target is not operator.getitem or not isinstance(n.args[0], Node):
            return False
        return not isinstance(self.env[n.args[0]], torch.Tensor)


def graph_costs(module: GraphModule, example_inputs: Any) -> GraphCosts:
    """What a run of ``module`` on example inputs shows of its nodes.

    Args:
        module: a float graph in eval mode; it is run once without gradients.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    >>> from torch.fx import symbolic_trace
    >>> gm = symbolic_trace(lambda x: (x @ x).reshape(x.size(0) * 2))
    >>> costs = graph_costs(gm, (torch.zeros(2, 2),))
    >>> costs.multiply_adds, sorted(costs.bookkeeping)
    ({'matmul': 8}, ['mul', 'size'])
    """
    return costs_and_outputs(module, example_inputs)[0]


def costs_and_outputs(module: GraphModule, example_inputs: Any) -> tuple[GraphCosts, Any]:
    """``graph_costs``, and what the graph returned in that run.

    >>> from torch.fx import symbolic_trace
    >>> costs_and_outputs(symbolic_trace(lambda x: x + 1), (torch.zeros(2),))[1]
    tensor([1., 1.])
    """
    args, kwargs = as_arguments(example_inputs)
    bound = signature_of(module).bind(*args, **kwargs)
    bound.apply_defaults()
    runner = _Runner(module, MultiplyAdds())
    with torch.random.fork_rng(devices=()), torch.no_grad():
        outputs = runner.run(*bound.args, *bound.kwargs.values())
    costs = GraphCosts(runner.counts, runner.uncounted, frozenset(runner.bookkeeping))
    return costs, outputs


def multiply_adds(module: GraphModule, example_inputs: Any) -> dict[str, int]:
    """Multiply-adds of each node that has any, by node name; arguments as in ``graph_costs``.

    >>> from torch.fx import symbolic_trace
    >>> from torch import nn
    >>> gm = symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> multiply_adds(gm, (torch.zeros(2, 4),))
    {'_0': 64}
    """
    return dict(graph_costs(module, example_inputs).multiply_adds)


def total_of(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-adds of one call of any model; what cannot be counted is left out.

    >>> total_of(nn.LSTM(4, 6).eval(), torch.zeros(5, 3, 4))
    3600
    """
    args, kwargs = as_arguments(example_inputs)
    trial, counter = own_buffers(model), MultiplyAdds()
    with torch.random.fork_rng(devices=()), torch.no_grad(), counter:
        trial(*fresh(args), **fresh(kwargs))
    return counter.count
