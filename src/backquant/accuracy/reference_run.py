"""A reference model run node by node on one batch, several batches side by side.

Quantizing and dequantizing together takes four operations, to the same bits, where the graph's two take
several times as long. It is done where dequantizing follows at once: nothing can change the value between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from backquant.accuracy.figures import float_tensors
from backquant.calibrate.feed import bound_arguments, check_values
from backquant.errors import InputError, first_line

# Running a graph node by node, and how long its values are needed.


def run_node(module: fx.GraphModule, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """What ``node`` computes; ``value`` gives that of the nodes that it reads.

    >>> import torch
    >>> gm = fx.symbolic_trace(torch.nn.ReLU())
    >>> run_node(gm, list(gm.graph.nodes)[1], lambda node: torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """
    if node.op == "get_attr":
        return attrgetter(str(node.target))(module)
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def placeholders(
    module: fx.GraphModule, batch: Any, index: int, measured: Collection[str] | None = None
) -> dict[str, Any]:
    """What the inputs of the graph are for a batch, by the name of the node. ``measured``: those that are
    quantized, in which infinite values are refused (``measured_inputs``); ``None``: all.

    Raises ``InputError`` when it does not fit, ``CalibrationError`` when it holds values that are not finite.

    >>> placeholders(fx.symbolic_trace(lambda x, y: x + y), {"x": 1, "y": 2}, 0)
    {'x': 1, 'y': 2}
    """
    _ = module.code  # whose signature is that of the model
    bound = bound_arguments(module, batch, index)
    check_values(bound, index, measured)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target).lstrip("*")
        try:
            found[node.name] = bound.arguments[name]
        except KeyError as error:
            what = f"batch {index} has no {name!r}: {first_line(error)}"
            raise InputError(what, where=f"batch {index}", fix=f"pass {name!r}") from error
    return found


def last_uses(reads: Iterable[tuple[str, Iterable[str]]]) -> Mapping[str, list[str]]:
    """Which values are read for the last time at each step: ``reads`` are steps with what they read.

    >>> last_uses([("a", []), ("b", ["a"]), ("c", ["a"])])
    {'c': ['a']}
    """
    last: dict[str, str] = {}
    for step, names in reads:
        last.update(dict.fromkeys(names, step))
    found: dict[str, list[str]] = {}
    for name, step in last.items():
        found.setdefault(step, []).append(name)
    return found


_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


class Plan:
    """What every run of one graph needs: when values are read for the last time, and what is rounded."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.nodes = nodes = list(module.graph.nodes)
        self.last = last_uses((n.name, [read.name for read in n.all_input_nodes]) for n in nodes)
        self.rounded = {node.name for node in nodes if _is_rounded(node)}
        self.dequantized = {n.name for q in nodes if q.name in self.rounded for n in q.users}
        self.output = nodes[-1].name  # not "output" where a layer is called so


class Run:
    """The values of one run so far; ``inputs``: of the placeholders, by name."""

    def __init__(self, module: fx.GraphModule, plan: Plan, inputs: dict[str, Any]) -> None:
        self.module, self.plan = module, plan
        self.values = dict(inputs)

    def fork(self) -> Run:
        """A run that goes on from here otherwise; what it changes in place is its own."""
        other = copy.copy(self)
        other.values = tree_map_only(torch.Tensor, torch.clone, self.values)
        return other

    def step(self, node: fx.Node) -> None:
        """Run ``node``."""
        if node.op == "placeholder":
            return
        read: Any = node.args[0] if node.args else None
        if node.name in self.plan.rounded:
            self.set(node, self.values[read.name])
        elif node.name in self.plan.dequantized:
            qparams: Any = node.args[1:5]
            self.set(node, _rounded(self.values[read.name], *qparams))
        else:
            self.set(node, run_node(self.module, node, lambda read: self.values[read.name]))

    def set(self, node: fx.Node, value: Any) -> None:
        """The value of ``node``; what it was the last to read is dropped."""
        self.values[node.name] = value
        for name in self.plan.last.get(node.name, ()):
            self.values.pop(name, None)

    def outputs(self) -> list[torch.Tensor]:
        """Run to the end; the float tensors that the model returns."""
        for node in self.plan.nodes:
            self.step(node)
        return float_tensors(self.output())

    def output(self) -> Any:
        """What the model returns, behind the last step."""
        return self.values[self.plan.output]


def _is_rounded(node: fx.Node) -> bool:
    """Whether ``node`` quantizes a tensor per tensor for the next node alone, which dequantizes it."""
    behind = node.next
    return (
        str(node.target) == _QUANTIZE
        and list(node.users) == [behind]
        and str(behind.target) == _DEQUANTIZE
        and behind.args[1:] == node.args[1:]
    )


def _rounded(values: torch.Tensor, scale: float, zero_point: int, low: int, high: int) -> Any:
    """
    >>> _rounded(torch.tensor([-1.0, 0.26, 9.0]), 0.1, 2, 0, 12)
    tensor([-0.2000,  0.3000,  1.0000])
    """
    steps = values.mul(1.0 / scale).round_()
    return steps.clamp_(low - zero_point, high - zero_point).mul_(scale)
