"""The quantized layers whose biases can be corrected, and what they compute."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from backquant.accuracy.biases.layer_statistics import LAYERS, Seen
from backquant.accuracy.recipes.draft import weighted_part
from backquant.accuracy.reference_run import Run
from backquant.graph import get_module


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
