"""A digest of what a lowered graph computes beside its weights: operators, qparams, order."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from backquant.lower.kernels.configured import KernelModule


def fingerprint(graph_module: fx.GraphModule) -> torch.Tensor:
    """The SHA-256 of every operation with its literal arguments, as ``uint8[32]``.

    Equal for two graphs that differ in names and weights only.

    >>> one, two = (fx.symbolic_trace(lambda x: x * 2 + step) for step in (1, 3))
    >>> bool((fingerprint(one) == fingerprint(one)).all()), fingerprint(one).shape
    (True, torch.Size([32]))
    >>> bool((fingerprint(one) == fingerprint(two)).all())
    False
    """
    number = {node: position for position, node in enumerate(graph_module.graph.nodes)}
    digest = hashlib.sha256()
    for node in graph_module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        digest.update(f"{node.op} {_called(node, graph_module)} {arguments}\n".encode())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def _called(node: fx.Node, graph_module: fx.GraphModule) -> str:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        config: Any = (
            sorted(module.artifact_config().items()) if isinstance(module, KernelModule) else module
        )
        return f"{node.target} {type(module).__name__} {config}"
    if node.op == "call_function":
        target: Any = node.target
        return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
    return "" if node.op in ("placeholder", "output") else str(node.target)
