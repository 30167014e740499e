"""Fusions that PyTorch gets wrong or fails on; ours are compared without it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.match import Fusion

__all__ = ["fusion_causes"]

CONFLICT = "calls of one module are fused differently: the last one wins in PyTorch"
CONSTANT = "onednn fuses the sum with a constant, or of a value with itself"
FUNCTION = "the fuser of a linear layer and a function fails in PyTorch"
SEQUENCES = "a batch norm over sequences is folded into the linear layer before it"


def fusion_causes(module: fx.GraphModule, fusions: Iterable[Fusion], backend: str) -> set[str]:
    """The known defects of PyTorch's fusion that this captured graph runs into."""
    causes = set()
    planned = list(fusions)
    if _conflict(module, planned):
        causes.add(CONFLICT)
    modules = dict(module.named_modules())
    if backend == "onednn" and any(
        _calls_behind_linear(node, modules) for node in module.graph.nodes
    ):
        causes.add(FUNCTION)
    if backend == "onednn" and any(_fuses_wrongly(node, modules) for node in module.graph.nodes):
        causes.add(CONSTANT)
    if any(_folds_sequences(node, modules) for node in module.graph.nodes):
        causes.add(SEQUENCES)
    return causes


def _conflict(module: fx.GraphModule, fusions: list[Fusion]) -> bool:
    targets = {node.name: node.target for node in module.graph.nodes}
    calls = Counter(node.target for node in module.graph.nodes if node.op == "call_module")
    kinds: dict[Any, set[Any]] = {}
    fused: Counter[Any] = Counter()
    for fusion in fusions:
        root = targets[fusion.root]
        parts = tuple(targets[name] for name in fusion.nodes)
        kinds.setdefault(root, set()).add((fusion.entry, parts))
        fused[root] += 1
    return any(len(kinds[root]) > 1 or fused[root] < calls[root] for root in kinds)


def _calls_behind_linear(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A function that PyTorch's fuser takes for a module."""
    if node.target not in (torch.tanh, F.leaky_relu) or not node.all_input_nodes:
        return False
    return isinstance(modules.get(str(node.all_input_nodes[0].target)), nn.Linear)


def _fuses_wrongly(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """``y + y`` and ``y + 1`` behind a convolution."""
    if node.target not in (operator.add, torch.add) or len(node.args) < 2:
        return False
    one, two = node.args[:2]
    kinds = (nn.Conv2d, nn.BatchNorm2d)
    convolved = [
        isinstance(value, fx.Node) and isinstance(modules.get(str(value.target)), kinds)
        for value in (one, two)
    ]
    return any(convolved) and (one is two or not isinstance(two, fx.Node))


def _folds_sequences(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if not isinstance(modules.get(str(node.target)), nn.BatchNorm1d):
        return False
    below = node.args[0]
    return isinstance(below, fx.Node) and isinstance(modules.get(str(below.target)), nn.Linear)
