"""Is a graph module well formed?"""

from __future__ import annotations

from typing import Any

from torch import fx

from backquant.errors import PassError


def complaints(module: fx.GraphModule) -> list[str]:
    """What is wrong with a graph module, one sentence each; empty when it is well formed.

    1. The graph has one output, and it is the last node.
    2. Each node uses nodes of this graph that stand before it, and names are unique.
    3. Each ``call_module`` and ``get_attr`` target resolves.

    >>> import torch
    >>> gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    >>> del gm._modules["0"]
    >>> complaints(gm)
    ["_0 calls the missing module '0'"]
    """
    found: list[str] = []
    seen: set[fx.Node] = set()
    names: set[str] = set()
    modules = dict(module.named_modules(remove_duplicate=False))
    outputs = 0
    last: fx.Node | None = None
    for node in module.graph.nodes:
        if node.name in names:
            found.append(f"two nodes are named {node.name!r}")
        if any(source not in seen for source in node.all_input_nodes):
            late = [s.name for s in node.all_input_nodes if s not in seen]
            found.append(f"{node.name} uses {', '.join(late)} before it is computed")
        if node.op == "call_module" and node.target not in modules:
            found.append(f"{node.name} calls the missing module {node.target!r}")
        if node.op == "get_attr" and not _resolves(module, str(node.target)):
            found.append(f"{node.name} reads the missing attribute {node.target!r}")
        outputs += node.op == "output"
        names.add(node.name)
        seen.add(node)
        last = node
    if outputs != 1 or last is None or last.op != "output":
        found.append(f"the graph has {outputs} outputs, or the output is not last")
    return found


def verify(module: fx.GraphModule, *, after: str) -> None:
    """Raise ``PassError`` naming the step ``after`` which the graph is not well formed."""
    found = complaints(module)
    if found:
        raise PassError(f"the graph is broken: {found[0]}", where=f"after {after}")
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise PassError(f"the graph is broken: {error}", where=f"after {after}") from error


def _resolves(module: fx.GraphModule, target: str) -> bool:
    owner: Any = module
    for name in target.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
