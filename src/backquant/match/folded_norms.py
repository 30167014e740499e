"""Whether a batch norm normalises the features of the layer that it would be folded into.

Without statistics it cannot be folded at all. Its channels are axis 1. Those of a linear layer over
sequences, and of a convolution without a batch, are another axis: folded, the model would compute something
else. *Different:* PyTorch looks at classes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from backquant.graph import GraphIndex
from backquant.graph.shapes import GraphValues
from backquant.nn.intrinsic.rank import rank_to_fold


def keeps_channels(nodes: Iterable[fx.Node], graph: GraphIndex, values: GraphValues) -> bool:
    """Whether every batch norm among ``nodes`` may be folded, as far as ``values`` are known."""
    for node, root, norm in _norms(nodes, graph):
        if norm.running_mean is None:
            return False
        if isinstance(root, nn.Linear) and root.out_features != norm.num_features:
            return False
        needed = rank_to_fold(root, norm)
        known = None if needed is None else values.of(node.name)
        if known is not None and len(known.shape) != needed:
            return False
    return True


def unseen_rank(nodes: Iterable[fx.Node], graph: GraphIndex, values: GraphValues) -> int | None:
    """The rank of inputs at which ``nodes`` may be folded, if ``values`` do not know which they have."""
    for node, root, norm in _norms(nodes, graph):
        needed = rank_to_fold(root, norm)
        if needed is not None and values.of(node.name) is None:
            return needed
    return None


def _norms(
    nodes: Iterable[fx.Node], graph: GraphIndex
) -> Iterator[tuple[fx.Node, nn.Module, _BatchNorm]]:
    """The batch norms among ``nodes``, each with the node before it and the module which that one calls."""
    inside = set(nodes)
    for node in inside:
        norm, source = graph.module_of(node), node.args[0] if node.args else None
        if isinstance(norm, _BatchNorm) and isinstance(source, fx.Node) and source in inside:
            root = graph.module_of(source)
            if root is not None:
                yield source, root, norm
