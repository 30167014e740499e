"""Edits of a graph module. Each is local: none scans the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx, nn

from backquant.graph.provenance import Provenance


def get_module(root: nn.Module, path: str) -> nn.Module:
    """The submodule at a dotted path; ``root`` itself for ``""``.

    >>> get_module(nn.Sequential(nn.ReLU()), "0")
    ReLU()
    """
    module: Any = root
    for name in path.split(".") if path else ():
        module = module._modules.get(name)
        if module is None:
            # for attributes that are no children, and for the error
            return root.get_submodule(path)
    found: nn.Module = module
    return found


def weighted_part(module: nn.Module) -> nn.Module:
    """The layer that a fused module begins with, which has its weight; any other module itself.

    >>> weighted_part(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    Linear(in_features=1, out_features=1, bias=True)
    """
    return module[0] if isinstance(module, nn.Sequential) and len(module) else module


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` at a dotted path, replacing what is there and creating containers.

    >>> root = nn.Module()
    >>> set_module(root, "encoder.fc", nn.Linear(2, 2))
    >>> get_module(root, "encoder.fc")
    Linear(in_features=2, out_features=2, bias=True)
    """
    parent_path, _, name = path.rpartition(".")
    parent = root
    for part in parent_path.split(".") if parent_path else ():
        child = parent._modules.get(part)
        if child is None:
            child = nn.Module()
            child.training = root.training
            parent.add_module(part, child)
        parent = child
    if name in parent.__dict__:
        del parent.__dict__[name]
    if name in parent._modules:
        parent._modules[name] = module  # the same position: Sequential runs children in order
    else:
        parent.add_module(name, module)


def made_module(root: nn.Module, path: str) -> nn.Module:
    """The submodule at a dotted path, an empty one where there is none."""
    try:
        return get_module(root, path)
    except AttributeError:
        set_module(root, path, nn.Module())
        return get_module(root, path)


def free_path(root: nn.Module, path: str) -> str:
    """``path`` with the first number behind it that is not taken.

    >>> free_path(nn.ModuleDict({"fc": nn.ReLU(), "fc_1": nn.ReLU()}), "fc")
    'fc_2'
    """
    owner, name = root.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    number = 1
    while hasattr(owner, f"{name}_{number}"):
        number += 1
    return f"{path}_{number}"


class NamePool:
    """Unused attribute names ``prefix0, prefix1, ...``; each is given out once.

    >>> names = NamePool(nn.Module())
    >>> names.take("observer_"), names.take("observer_")
    ('observer_0', 'observer_1')
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._next: dict[str, int] = {}

    def take(self, prefix: str) -> str:
        """The next name that the root does not have. Dots become underscores."""
        prefix = prefix.replace(".", "_")
        number = self._next.get(prefix, 0)
        while hasattr(self._root, f"{prefix}{number}"):
            number += 1
        self._next[prefix] = number + 1
        return f"{prefix}{number}"


class GraphEditor:
    """Edits one graph module in place and records where new nodes come from.

    Call ``finish()`` after the last edit.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> editor = GraphEditor(gm)
    >>> value = next(node for node in gm.graph.nodes if node.name == "_0")
    >>> _ = editor.insert_module_after(value, "scale", nn.Identity())
    >>> [node.name for node in editor.finish().graph.nodes]
    ['input_1', '_0', 'scale', 'output']
    """

    def __init__(self, module: fx.GraphModule, provenance: Provenance | None = None) -> None:
        self.module = module
        self.graph = module.graph
        self.provenance = Provenance() if provenance is None else provenance
        self.names = NamePool(module)

    def insert_module_after(self, value: fx.Node, path: str, module: nn.Module) -> fx.Node:
        """Install ``module`` at ``path``, call it on ``value``, and give the result to all users."""
        set_module(self.module, path, module)
        users = list(value.users)
        with self.graph.inserting_after(value):
            node = self.graph.call_module(path, (value,))
        for user in users:
            user.replace_input_with(value, node)
        self.provenance.record(node.name, (value.name,))
        return node

    def read_buffer(self, before: fx.Node, path: str, tensor: torch.Tensor) -> fx.Node:
        """Register a buffer at a dotted path and read it right before a node."""
        owner, _, name = path.rpartition(".")
        made_module(self.module, owner).register_buffer(name, tensor)
        with self.graph.inserting_before(before):
            return self.graph.get_attr(path)

    def replace_uses(
        self, old: fx.Node, new: fx.Node, keep: Collection[fx.Node] = ()
    ) -> list[fx.Node]:
        """Users of ``old``, except ``new`` and those in ``keep``, use ``new``. Returns them."""
        changed = [user for user in list(old.users) if user is not new and user not in keep]
        for user in changed:
            user.replace_input_with(old, new)
        return changed

    def erase(self, node: fx.Node) -> None:
        """Remove a node that nobody uses."""
        self.graph.erase_node(node)

    def finish(self) -> fx.GraphModule:
        """Regenerate the module's code and return it."""
        self.module.recompile()
        return self.module


def remove_unused_modules(module: fx.GraphModule) -> None:
    """Drop submodules, parameters and buffers that no node of the graph refers to.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> gm.add_module("left_over", nn.Linear(2, 2))
    >>> remove_unused_modules(gm)
    >>> [name for name, _ in gm.named_children()]
    ['0']
    """
    targets = [str(n.target) for n in module.graph.nodes if n.op in ("call_module", "get_attr")]
    called = {str(n.target) for n in module.graph.nodes if n.op == "call_module"}
    _keep_only(module, _tree(targets), called, "")


def _tree(paths: Iterable[str]) -> dict[str, Any]:
    """Dotted paths as nested dictionaries."""
    tree: dict[str, Any] = {}
    for path in paths:
        branch = tree
        for name in path.split("."):
            branch = branch.setdefault(name, {})
    return tree


def _keep_only(module: nn.Module, tree: dict[str, Any], called: set[str], path: str) -> None:
    """Drop the children of ``module`` that are not in ``tree``; what is called stays whole."""
    for name in list(module._modules):
        child, place = module._modules[name], f"{path}.{name}" if path else name
        if name not in tree:
            del module._modules[name]
        elif child is not None and place not in called:
            _keep_only(child, tree[name], called, place)
