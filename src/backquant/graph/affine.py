"""Constants that scale or shift what a layer returns, in its weights.

Models that were imported from other formats have a batch norm as a product and a sum behind the convolution;
others scale a branch (layer scale), or the queries of an attention, by a number. In the weights they cost
nothing, and the layer is fused with the activation behind it. Dropout and permutations may stand between.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from backquant.graph.arithmetic import arithmetic_of, plain_name
from backquant.graph.constant_products import Constants
from backquant.graph.edit import get_module, set_module
from backquant.graph.provenance import Scope
from backquant.graph.shapes import GraphValues

_PERMUTATIONS = frozenset({torch.permute, "permute"})
# identities in evaluation mode
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

# position of the channels in the output, counted from the end
_CHANNEL_AXES: dict[type[nn.Module], int] = {
    nn.Linear: -1,
    nn.Conv1d: -2,
    nn.Conv2d: -3,
    nn.Conv3d: -4,
    nn.ConvTranspose1d: -2,
    nn.ConvTranspose2d: -3,
    nn.ConvTranspose3d: -4,
}


def fold_affines(
    module: fx.GraphModule,
    scopes: dict[str, Scope],
    values: GraphValues,
    kept: Collection[Any] = (),
) -> int:
    """Fold products and sums of a layer's output with constants into the layer, in place; how many.

    The layer is a convolution or a linear layer that is called once, and nothing else reads its output. A
    constant is a number, or a tensor with one value, or one for each channel. The layer's module is replaced.

    Args:
        module: a graph in evaluation mode.
        scopes: of its nodes.
        values: the ranks of its tensors: a constant that adds axes stays.
        kept: operators that stay as they are.

    >>> class Scaled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.conv = nn.Conv2d(1, 2, 1)
    ...     def forward(self, x):
    ...         return 2 * self.conv(x) + 1
    >>> module = fx.symbolic_trace(Scaled())
    >>> values = GraphValues(module, (torch.zeros(1, 1, 4, 4),))
    >>> fold_affines(module, {}, values), [node.name for node in module.graph.nodes]
    (2, ['x', 'conv', 'output'])
    """
    calls = list(module.graph.find_nodes(op="call_module"))
    layers = {node: get_module(module, str(node.target)) for node in calls}
    times = Counter(map(id, layers.values()))
    constants = Constants(module)
    count = 0
    for node, layer in layers.items():
        if times[id(layer)] > 1 or not _can_change(layer) or not _meets_arithmetic(node, layers):
            continue
        facts = values.of(node.name)  # the first call runs the model
        if facts is None:
            continue
        affine = _Affine(layer, len(facts.shape), constants)
        steps: list[tuple[fx.Node, fx.Node]] = []
        last = node
        while (user := _only_user(last)) is not None and user.target not in kept:
            if affine.then(user, last):
                steps.append((user, last))
            elif not affine.passes(user, layers.get(user)):
                break
            last = user
        if steps:
            set_module(module, str(node.target), affine.folded())
            _erase(module.graph, steps, scopes)
            count += len(steps)
    return count


class _Affine:
    """What a layer's output is multiplied by, and is then added: a number for each channel."""

    def __init__(self, layer: Any, rank: int, constants: Constants) -> None:
        self._layer = layer
        self._rank = rank
        self._axis = _CHANNEL_AXES[type(layer)]
        self._constants = constants
        weight: Tensor = layer.weight
        channels = getattr(layer, "out_channels", len(weight))
        self._scale = weight.new_ones(channels)
        self._shift = weight.new_zeros(channels)

    def then(self, step: fx.Node, last: fx.Node) -> bool:
        """Take in ``step``, which reads ``last``; whether it is such arithmetic with constants."""
        kind = arithmetic_of(step)
        if kind is None or step.args[0] is step.args[1]:
            return False
        is_first = step.args[0] is last
        value = self._per_channel(step.args[1] if is_first else step.args[0])
        if value is None or (kind == "div" and not is_first):
            return False
        scale, shift = self._scale, self._shift
        if kind == "add":
            shift = shift + value
        elif kind == "sub":
            scale, shift = (scale, shift - value) if is_first else (-scale, value - shift)
        elif kind == "mul":
            scale, shift = scale * value, shift * value
        else:
            scale, shift = scale / value, shift / value
        if not (scale.isfinite().all() and shift.isfinite().all()):
            return False
        self._scale, self._shift = scale, shift
        return True

    def passes(self, node: fx.Node, called: nn.Module | None) -> bool:
        """Whether ``node`` leaves values as they are, at most with their axes in another order."""
        if called is not None:
            return type(called) in _NOTHING
        if not _permutes(node):
            return False
        given: Any = node.args[1:] if len(node.args) > 2 else node.args[1]
        if not isinstance(given, tuple | list) or any(type(axis) is not int for axis in given):
            return False
        order = [axis % self._rank for axis in given]
        self._axis = order.index(self._axis % self._rank) - self._rank
        return True

    def _per_channel(self, value: Any) -> Tensor | None:
        """A constant as a number for each channel; ``None``: it is something else, or adds axes."""
        channels = self._scale
        if isinstance(value, int | float) and not isinstance(value, bool):
            return torch.full_like(channels, value)
        tensor = self._constants.value(value)
        if tensor is None or tensor.dim() > self._rank:
            return None
        if tensor.dim() > 0 and tensor.dtype != channels.dtype:
            return None
        if tensor.numel() > 1:
            axis = self._axis
            if tensor.dim() < -axis or not tensor.shape[axis] == tensor.numel() == len(channels):
                return None
        return tensor.detach().reshape(-1).to(channels.dtype).expand_as(channels)

    def folded(self) -> nn.Module:
        """A layer of the same class with tensors of its own."""
        old = self._layer
        weight, bias = old.weight.detach(), old.bias
        shift = self._shift if bias is None else bias.detach() * self._scale + self._shift
        made: Any = copy.copy(old)
        made._parameters = dict(old._parameters)
        made.weight = nn.Parameter(weight * self._by_weight(weight), old.weight.requires_grad)
        made.bias = nn.Parameter(shift, old.weight.requires_grad)
        return made  # type: ignore[no-any-return]

    def _by_weight(self, weight: Tensor) -> Tensor:
        """The scales in the layout of the weights."""
        if not getattr(self._layer, "transposed", False):
            return self._scale.view(-1, *[1] * (weight.dim() - 1))
        groups = self._layer.groups  # the weight has the shape (in, out / groups, ...)
        by_group = self._scale.view(groups, 1, -1).expand(-1, len(weight) // groups, -1)
        return by_group.reshape(len(weight), -1, *[1] * (weight.dim() - 2))


def _can_change(layer: Any) -> bool:
    """Whether it is a layer whose weights are all that it is."""
    if type(layer) not in _CHANNEL_AXES or layer.weight.is_meta:
        return False
    is_float = layer.weight.is_floating_point()
    return is_float and not (layer._forward_hooks or layer._forward_pre_hooks)


def _only_user(node: fx.Node) -> fx.Node | None:
    """The call that alone reads ``node``."""
    user = next(iter(node.users), None)
    is_call = user is not None and user.op.startswith("call_")
    return user if is_call and len(node.users) == 1 else None


def _meets_arithmetic(node: fx.Node, layers: Mapping[fx.Node, nn.Module]) -> bool:
    """Whether arithmetic is the first that changes what ``node`` gives."""
    user = _only_user(node)
    while user is not None and (type(layers.get(user)) in _NOTHING or _permutes(user)):
        user = _only_user(user)
    return user is not None and arithmetic_of(user) is not None


def _permutes(node: fx.Node) -> bool:
    return plain_name(node.target) in _PERMUTATIONS and not node.kwargs and len(node.args) > 1


def _erase(graph: fx.Graph, steps: list[tuple[fx.Node, fx.Node]], scopes: dict[str, Scope]) -> None:
    """Let what each step reads stand for it: it goes, and its constants with it."""
    for step, last in reversed(steps):
        step.replace_all_uses_with(last)
        read = [each for each in step.all_input_nodes if each.op == "get_attr"]
        for old in (step, *read):
            if not old.users:
                graph.erase_node(old)
                scopes.pop(old.name, None)
