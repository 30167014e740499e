"""A reference model run node by node on one batch, several batches side by side.

Quantizing and dequantizing together takes four operations, to the same bits, where the graph's two take
several times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from backquant.accuracy.biases.watched import LAYERS, Seen
from backquant.accuracy.nodes import last_uses, run_node
from backquant.accuracy.recipes.draft import weighted_part
from backquant.graph import get_module

_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


class Plan:
    """What every run of one graph needs: when values are read for the last time, and what is rounded."""

    def __init__(self, module: fx.GraphModule) -> None:
        nodes = list(module.graph.nodes)
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

    def output(self) -> Any:
        """What the model returns, behind the last step."""
        return self.values[self.plan.output]


def _is_rounded(node: fx.Node) -> bool:
    """Whether ``node`` quantizes a tensor per tensor for dequantizing alone."""
    return str(node.target) == _QUANTIZE and all(
        str(user.target) == _DEQUANTIZE and user.args[1:] == node.args[1:] for user in node.users
    )


def _rounded(values: torch.Tensor, scale: float, zero_point: int, low: int, high: int) -> Any:
    """
    >>> _rounded(torch.tensor([-1.0, 0.26, 9.0]), 0.1, 2, 0, 12)
    tensor([-0.2000,  0.3000,  1.0000])
    """
    steps = values.mul(1.0 / scale).round_()
    return steps.clamp_(low - zero_point, high - zero_point).mul_(scale)


@dataclass(frozen=True)
class LayerCall:
    """A quantized layer and its only call. ``is_last``: no other layer reads what comes of it."""

    path: str
    node: fx.Node
    float_part: Any
    called: nn.Module
    is_last: bool

    def in_float(self) -> Any:
        """The layer with the weights that its integers stand for."""
        reference: Any = weighted_part(self.called)
        made = copy.copy(self.float_part)
        weight = nn.Parameter(reference.dequantized_weight(), requires_grad=False)
        made._parameters = {"weight": weight, "bias": reference.bias}
        return made

    def before_activation(self, part: Any, run: Run) -> torch.Tensor:
        """What the layer itself gives, without what is fused with it."""
        result: torch.Tensor = part(run.values[self.node.all_input_nodes[0].name])
        return result

    def spread(self, channels: torch.Tensor) -> torch.Tensor:
        """A number for each output channel, in the shape that results are added to."""
        weight = self.float_part.weight
        return channels.to(weight.dtype).reshape(-1, *[1] * (weight.dim() - 2))

    def activated(self, result: Any) -> Any:
        """The result of the call, from that of the layer itself."""
        if self.called is not weighted_part(self.called):
            for behind in list(self.called.children())[1:]:
                result = behind(result)
        return result


def layer_calls(
    prepared: fx.GraphModule, reference: fx.GraphModule, seen: list[Seen]
) -> dict[str, LayerCall]:
    """The quantized layers that every batch of ``seen`` went through, by the name of their call."""
    found: dict[str, LayerCall] = {}
    leads_on: set[fx.Node] = set()
    for node in reversed(reference.graph.nodes):
        behind = any(user in leads_on for user in node.users)
        path = str(node.target)
        if node.op == "call_module" and all(path in one.gives for one in seen):
            part = weighted_part(get_module(prepared, path))
            called = get_module(reference, path)
            own: Any = weighted_part(called)
            integers = hasattr(own, "dequantized_weight") and not own.weight.is_floating_point()
            if isinstance(part, LAYERS) and integers and len(node.all_input_nodes) == 1:
                found[node.name] = LayerCall(path, node, part, called, not behind)
                behind = True
        if behind:
            leads_on.add(node)
    return found


def set_biases(reference: fx.GraphModule, biases: Mapping[str, torch.Tensor]) -> None:
    """Give layers of ``reference`` these biases, by path."""
    for path, bias in biases.items():
        part = weighted_part(get_module(reference, path))
        part._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
