"""Batch norms that are written as functions, as the modules that they are, behind a convolution.

Classes of other libraries that join a batch norm with an activation call ``F.batch_norm`` on their own
tensors (timm's ``BatchNormAct2d``). Fusion knows modules: as one it is folded into the weights before it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.constant_products import Constants
from backquant.graph.edit import NamePool
from backquant.graph.provenance import Scope
from backquant.graph.shapes import GraphValues

_BEHIND: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}
_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def batch_norm_modules(
    module: fx.GraphModule,
    scopes: dict[str, Scope],
    values: GraphValues,
    kept: Collection[Any] = (),
) -> int:
    """Write ``F.batch_norm`` of constants behind a convolution as a module, in place; how many.

    Args:
        module: a graph in evaluation mode.
        scopes: of its nodes; a new node has that of the function's.
        values: the ranks of its tensors: without a batch another axis is normalised.
        kept: operators that stay as they are.

    >>> class Joined(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
    >>> class Tracer(fx.Tracer):
    ...     def is_leaf_module(self, module, path):
    ...         return type(module) is nn.Conv2d
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), Joined(2)).eval()
    >>> module = fx.GraphModule(model, Tracer().trace(model))
    >>> values = GraphValues(module, (torch.zeros(1, 1, 4, 4),))
    >>> batch_norm_modules(module, {}, values), [node.op for node in module.graph.nodes]
    (1, ['placeholder', 'call_module', 'call_module', 'output'])
    """
    if F.batch_norm in kept:
        return 0
    found = list(module.graph.find_nodes(op="call_function", target=F.batch_norm))
    if not found:
        return 0
    constants, names = Constants(module), NamePool(module)
    count = 0
    for node in found:
        kind = _kind(module, node, values)
        made = None if kind is None else _module(node, kind, constants)
        if made is not None:
            path = names.take(f"{str(node.args[0].target).replace('.', '_')}_batch_norm_")
            module.add_module(path, made)
            _write(module.graph, node, path, scopes)
            count += 1
    return count


def _kind(module: fx.GraphModule, node: fx.Node, values: GraphValues) -> type[nn.Module] | None:
    """The class of batch norm that normalises the channels of the convolution before ``node``."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return None
    conv: Any = module.get_submodule(str(source.target))
    kind = _BEHIND.get(type(conv))
    known = None if kind is None else values.of(source.name)
    return kind if known is not None and len(known.shape) == len(conv.kernel_size) + 2 else None


def _module(node: fx.Node, kind: type[nn.Module], constants: Constants) -> nn.Module | None:
    """The batch norm that ``node`` computes, with the same tensors; ``None`` if these are not constant."""
    given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    tensors = {name: constants.value(given.get(name)) for name in _NAMES[1:5]}
    mean, var = tensors["running_mean"], tensors["running_var"]
    is_known = all(tensors[name] is not None for name in tensors if given.get(name) is not None)
    if mean is None or var is None or not is_known or given.get("training", False) is not False:
        return None
    if any(isinstance(given.get(name), fx.Node) for name in ("momentum", "eps")):
        return None
    made: Any = kind(len(mean), eps=given.get("eps", 1e-5), device="meta")
    made.running_mean, made.running_var = mean, var
    ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
    for name, neutral in (("weight", ones), ("bias", zeros)):
        value = tensors[name]
        kept = isinstance(value, nn.Parameter)
        made.register_parameter(
            name,
            value if kept else nn.Parameter(neutral if value is None else value.detach(), False),
        )
    made.num_batches_tracked = torch.tensor(0)
    return made.eval()  # type: ignore[no-any-return]


def _write(graph: fx.Graph, node: fx.Node, path: str, scopes: dict[str, Scope]) -> None:
    with graph.inserting_before(node):
        made = graph.call_module(path, (node.args[0],))
    made.meta.update(node.meta)
    scopes[made.name] = scopes.get(node.name, Scope("", None))
    node.replace_all_uses_with(made)
    for old in (node, *node.all_input_nodes[1:]):
        if not old.users:
            graph.erase_node(old)
            scopes.pop(old.name, None)
