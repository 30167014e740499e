"""Layers whose weights or biases are computed: constants folded in, products as the layers that they are."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from backquant.graph.edit import set_module
from backquant.graph.rewrite import Constants, GraphRewriter, arguments_by_name, only_reader
from backquant.operators.normal_form import arithmetic_of, plain_name

# Constants that scale or shift what a layer returns, in its weights.
#
# Models that were imported from other formats have a batch norm as a product and a sum behind the
# convolution; others scale a branch (layer scale), or the queries of an attention, by a number. In the
# weights they cost nothing, and the layer is fused with the activation behind it. Dropout and permutations
# may stand between.

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


def fold_affine(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """Fold products and sums of a layer's output with constants into the layer, whose module is replaced.

    The layer is a convolution or a linear layer that is called once, and nothing else reads its output. A
    constant is a number, or a tensor with one value, or one for each channel; one that adds axes stays.

    >>> from backquant.graph.shapes import GraphValues
    >>> class Scaled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.conv = nn.Conv2d(1, 2, 1)
    ...     def forward(self, x):
    ...         return 2 * self.conv(x) + 1
    >>> module = fx.symbolic_trace(Scaled())
    >>> values = GraphValues(module, (torch.zeros(1, 1, 4, 4),))
    >>> GraphRewriter(module, values=values).apply(fold_affine), [node.name for node in module.graph.nodes]
    (1, ['x', 'conv', 'output'])
    """
    layer = write.called(node)
    if layer is None or not _can_change(layer) or not _meets_arithmetic(node, write):
        return None
    facts = None if write.times[layer] > 1 else write.facts(node)
    if facts is None:
        return None
    affine = _Affine(layer, len(facts.shape), write.constants)
    steps: list[tuple[fx.Node, fx.Node]] = []
    last = node
    while (reader := only_reader(last)) is not None and reader.target not in write.kept:
        if affine.then(reader, last):
            steps.append((reader, last))
        elif not affine.passes(reader, write.called(reader)):
            break
        last = reader
    if not steps:
        return None
    set_module(write.module, str(node.target), affine.folded())
    for step, before in reversed(steps):
        step.replace_all_uses_with(before)
        write.erase(step)
    return node


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
        made: nn.Module = copy.copy(old)
        made._parameters = dict(old._parameters)
        made.weight = nn.Parameter(weight * self._by_weight(weight), old.weight.requires_grad)
        made.bias = nn.Parameter(shift, old.weight.requires_grad)
        return made

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


def _meets_arithmetic(node: fx.Node, write: GraphRewriter) -> bool:
    """Whether arithmetic is the first that changes what ``node`` gives."""
    reader = only_reader(node)
    while reader is not None and (type(write.called(reader)) in _NOTHING or _permutes(reader)):
        reader = only_reader(reader)
    return reader is not None and arithmetic_of(reader) is not None


def _permutes(node: fx.Node) -> bool:
    return plain_name(node.target) in _PERMUTATIONS and not node.kwargs and len(node.args) > 1


# Biases that are computed, added behind the linear layer: no integer kernel takes them inside.
#
# Those of Swin V2 and BEiT, ``torch.cat((q, zeros, v))``, are constants and folded.
# A bias that depends on an input is an addition, and the product before it runs on integers.


def added_bias(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """The computed bias of a linear layer with a constant weight as an addition.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = torch.nn.Parameter(torch.ones(2, 3))
    ...     def forward(self, x, b):
    ...         return F.linear(x, self.w, b)
    >>> module = fx.symbolic_trace(Model())
    >>> GraphRewriter(module).apply(added_bias), [node.name for node in module.graph.nodes]
    (1, ['x', 'b', 'w', 'linear', 'add', 'output'])
    """
    if node.target is not F.linear:
        return None
    given = arguments_by_name(node, "input", "weight", "bias")
    bias, weight = given.get("bias"), given.get("weight")
    is_computed = isinstance(bias, fx.Node) and bias.op != "get_attr"
    if not is_computed or write.constants.value(weight) is None:
        return None
    node.args, node.kwargs = (given["input"], weight), {}
    write.follow(node, operator.add, bias)
    return node


# Linear layers whose weight depends on an input, as the products of two activations that they are.
#
# The rows of such a weight are often samples (CLIP compares images with texts so). A scale for each row, as
# of a weight, would be that of one sample of the calibration data, and another batch has other rows.


def product_of_activations(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A linear layer whose weight depends on an input as ``torch.matmul``, where the weight has two axes.

    >>> from backquant.graph.shapes import GraphValues
    >>> module = fx.symbolic_trace(lambda x, w: F.linear(x, w.relu()))
    >>> values = GraphValues(module, (torch.randn(2, 3), torch.randn(5, 3)))
    >>> GraphRewriter(module, values=values).apply(product_of_activations)
    1
    >>> [node.name for node in module.graph.nodes]
    ['x', 'w', 'relu', 'transpose', 'matmul', 'output']
    """
    is_function = node.op == "call_function"
    if not is_function or not (node.target is F.linear or plain_name(node.target) == "linear"):
        return None
    given = arguments_by_name(node, "input", "weight", "bias")
    weight: Any = given.get("weight")
    if not isinstance(weight, fx.Node) or weight.name in write.independent:
        return None
    facts = write.facts(weight)
    if facts is None or len(facts.shape) != 2:
        return None
    turned = write.call(node, "transpose", weight, 0, 1)
    made = write.call(node, torch.matmul, given["input"], turned)
    bias = given.get("bias")
    return made if bias is None else write.call(node, operator.add, made, bias)


# Products with a constant matrix, as the linear layers that they are.
#
# ``x @ w``, as models that were imported from other formats have it, has no integer kernel of two activations
# where ``w`` is one matrix for a batch of ``x``, and one of a linear layer does without a scale for ``w``
# that is measured. A constant that is then added along the last axis is the layer's bias.

_PRODUCTS = frozenset({torch.matmul, operator.matmul, torch.mm, "matmul", "mm"})


def linear_product(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A product with a constant matrix as ``F.linear``, with what is added to it.

    >>> class Product(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w, self.b = torch.ones(3, 2), torch.ones(2)
    ...     def forward(self, x):
    ...         return x @ self.w + self.b
    >>> module = fx.symbolic_trace(Product())
    >>> GraphRewriter(module).apply(linear_product), [node.name for node in module.graph.nodes]
    (1, ['x', 'b', 'w_transposed_0', 'linear', 'output'])
    >>> module(torch.ones(1, 4, 3)).shape
    torch.Size([1, 4, 2])
    """
    matrix = _matrix(node, write)
    if matrix is None:
        return None
    bias, last = _bias(node, write, matrix.shape[1]), only_reader(node)
    stored: Any = node.args[1]
    weight = write.buffer(node, f"{stored.target}_transposed_", matrix.detach().t())
    if bias is None or last is None:
        return write.call(node, F.linear, node.args[0], weight)
    made = write.call(node, F.linear, node.args[0], weight, bias)
    for new in (weight, made):  # the bias may be read behind the product
        last.prepend(new)
    write.replace(last, made)
    return made


def _matrix(node: fx.Node, write: GraphRewriter) -> torch.Tensor | None:
    """What ``node`` multiplies an activation with, if that is one constant matrix."""
    if node.op not in ("call_function", "call_method") or node.target not in _PRODUCTS:
        return None
    if len(node.args) != 2 or node.kwargs or write.constants.value(node.args[0]) is not None:
        return None
    value = write.constants.value(node.args[1])
    return value if value is not None and value.dim() == 2 and value.numel() else None


def _bias(node: fx.Node, write: GraphRewriter, width: int) -> fx.Node | None:
    """The constant that alone is added to ``node``, one number for each column."""
    reader = only_reader(node)
    if reader is None or arithmetic_of(reader) != "add":
        return None
    other = reader.args[1] if reader.args[0] is node else reader.args[0]
    value = write.constants.value(other)
    fits = value is not None and tuple(value.shape) == (width,)
    return other if fits and isinstance(other, fx.Node) else None
