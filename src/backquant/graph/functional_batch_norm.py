"""Batch norms that are written as functions, as the modules that they are, behind a convolution.

Classes of other libraries that join a batch norm with an activation call ``F.batch_norm`` on their own
tensors (timm's ``BatchNormAct2d``). Fusion knows modules: as one it is folded into the weights before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.rewrite import GraphRewriter, arguments_by_name

_BEHIND: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}
_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def batch_norm_module(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """``F.batch_norm`` of constants, behind a convolution of a batch, as a module.

    >>> from backquant.graph.shapes import GraphValues
    >>> class Joined(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
    >>> class Tracer(fx.Tracer):
    ...     def is_leaf_module(self, module, path):
    ...         return type(module) is nn.Conv2d
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), Joined(2)).eval()
    >>> module = fx.GraphModule(model, Tracer().trace(model))
    >>> values = GraphValues(module, (torch.zeros(1, 1, 4, 4),))
    >>> GraphRewriter(module, values=values).apply(batch_norm_module), len(module.graph.nodes)
    (1, 4)
    """
    source = node.args[0] if node.args else None
    if node.target is not F.batch_norm or not isinstance(source, fx.Node):
        return None
    conv: Any = write.called(source)
    kind = _BEHIND.get(type(conv))
    known = None if kind is None else write.facts(source)
    if kind is None or known is None or len(known.shape) != len(conv.kernel_size) + 2:
        return None
    made = _module(arguments_by_name(node, *_NAMES), kind, write)
    prefix = f"{str(source.target).replace('.', '_')}_batch_norm_"
    return None if made is None else write.submodule(node, prefix, made, source)


def _module(given: dict[str, Any], kind: type[nn.Module], write: GraphRewriter) -> nn.Module | None:
    """The batch norm of these arguments, with the same tensors; ``None`` if these are not constant."""
    tensors = {name: write.constants.value(given.get(name)) for name in _NAMES[1:5]}
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
