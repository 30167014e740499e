"""Layers in the forms that Inductor's matcher takes for integer kernels.

What it overlooks otherwise (torch 2.13, ``torch/_inductor/fx_passes/quantization.py``):

1. layers that share a weight: equal dequantize nodes are merged, and the pattern is of one reader;
2. two linear layers with one input that is transposed in memory: they become batched products of one
   expanded value, which is not divided between them;
3. a linear layer whose result is flattened to rows, as for a batch norm behind it: two reshapes become one,
   and the pattern has two.

And four defects: the weight of a linear layer is packed in the order that it has in memory, so that one that
is stored transposed (GPT-2's) gives wrong numbers; all are laid out in the order of their axes. And a
convolution adds its result to integers in place, and stops where these are a view of others (MobileViTv2's):
such an addition is written as a difference, which gives the same floats and is not fused. A linear layer adds
a value whose rows are not in one piece (an image's positions as rows, as in EfficientFormer) by a reference
kernel of oneDNN, ten thousand times as slow: this is written as a difference as well. So is what is added to
a ReLU or GELU of a linear layer: the layer takes in its activation first, the pattern of the addition takes
it for a layer without one, and compiling ends in an ``AssertionError``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false

from backquant.deploy.edits import AtenCalls, before, operands, replace, rewrite, sizes_of
from backquant.deploy.program import Program, origins_of_stacks
from backquant.graph.in_place import is_view
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize
from backquant.operators import overload, overloads

_CONVOLUTIONS = overloads("conv1d", "conv2d")
_RESHAPES = overloads("flatten", "view", "reshape")
_TAKEN_IN = overloads("relu", "gelu")  # activations that linear layers compute


def made_fusible(program: Program) -> Program:
    """``program``, itself changed, with layers in the forms that are fused; the values are the same.

    >>> from backquant.deploy.program import export_program
    >>> program = export_program(fx.symbolic_trace(torch.nn.ReLU()), (torch.zeros(2),), {}, None)
    >>> dict(made_fusible(program).origins)
    {'relu': 'relu'}
    """
    graph = program.exported.graph
    _lay_out(program.exported.state_dict)
    _separate_weights(graph)
    for node in graph.find_nodes(op="call_function", target=overload("linear")):
        if is_dequantize(node.args[0]):
            _make_contiguous(_flatten_before(node))
    rewrite(program.exported, {overload("add"): _as_difference})
    return Program(program.exported, origins_of_stacks(graph))


def _lay_out(weights: dict[str, torch.Tensor]) -> None:
    """Matrices of integers in the order of their axes."""
    for name, weight in weights.items():
        if weight.dtype == torch.int8 and weight.dim() == 2:
            weights[name] = weight.contiguous()


def _separate_weights(graph: fx.Graph) -> None:
    """Case 1: a dequantize node for each reader; they differ in a bound, which the operator does not use."""
    readers: Counter[Any] = Counter()
    for node in list(filter(is_channel_dequantize, graph.nodes)):
        weight, scale, zero_point, axis, low, high, dtype = cast("tuple[Any, ...]", node.args)
        for user in list(node.users):
            args = (weight, scale, zero_point, axis, low + readers[weight], high, dtype)
            user.replace_input_with(node, before(user, node.target, args))
            readers[weight] += 1


def _make_contiguous(linear: fx.Node) -> None:
    """Case 2: the integers are, and what reads them dequantizes them by itself."""
    dequantize: Any = linear.args[0]
    integers, *qparams = dequantize.args
    if is_contiguous_or_false(integers.meta["val"]):
        return
    value = AtenCalls(dequantize).contiguous(integers)
    linear.replace_input_with(dequantize, before(linear, dequantize.target, (value, *qparams)))


def _as_difference(add: fx.Node, write: AtenCalls) -> Any:
    """``a + b`` is ``a - (-b)``, bit for bit."""
    pairs: Any = () if add.kwargs else (add.args, add.args[::-1])
    for defect in (_adds_to_view, _adds_columns, _adds_to_activation):
        for value, other in pairs:
            if defect(value, other):
                return write.sub(value, write.neg(other))
    return None


def _adds_to_view(conv: Any, other: Any) -> bool:
    """The second defect."""
    if getattr(conv, "target", None) not in _CONVOLUTIONS or not is_dequantize(other):
        return False
    integers = other.args[0]
    value = integers.args[0] if integers.args and is_quantize(integers) else integers
    return isinstance(value, fx.Node) and is_view(value)


def _adds_columns(linear: Any, other: Any) -> bool:
    """The third defect: what is added to a linear layer lies in memory column by column."""
    if not _is_quantized_linear(linear) or not _can_be_negated(other):
        return False
    value = other.meta["val"]
    return bool(value.dim() > 1 and value.stride(-1) != 1)


def _adds_to_activation(value: Any, other: Any) -> bool:
    """The fourth defect: something is added to an activation that a linear layer takes in."""
    activation = _unreshaped(value)
    if getattr(activation, "target", None) not in _TAKEN_IN:
        return False
    return _is_quantized_linear(activation.args[0]) and _can_be_negated(other)


def _can_be_negated(value: Any) -> bool:
    """Whether it is a tensor of floats: truths cannot be negated, and bytes wrap around."""
    held = value.meta["val"] if isinstance(value, fx.Node) else None
    return isinstance(held, torch.Tensor) and held.is_floating_point()


def _unreshaped(node: fx.Node) -> Any:
    while isinstance(node, fx.Node) and node.target in _RESHAPES:
        node = operands(node)[0]
    return node


def _is_quantized_linear(node: fx.Node) -> bool:
    node = _unreshaped(node)
    target = getattr(node, "target", None)
    return target == overload("linear") and is_dequantize(node.args[0])


def _flatten_before(linear: fx.Node) -> fx.Node:
    """Case 3: the integers are flattened, and the layer computes rows; other readers reshape these."""
    flattened: list[Any] = [user for user in linear.users if _gives_rows(user, linear)]
    sizes = sizes_of(linear)
    if not flattened or len(sizes) == 2 or sum(isinstance(n, torch.SymInt) for n in sizes) > 1:
        return linear
    dequantize, *rest = cast("list[Any]", linear.args)
    integers, *qparams = dequantize.args
    write = AtenCalls(linear)
    rows = write.flatten(integers, 0, -2)
    made = write.linear(write.call(dequantize.target, rows, *qparams), *rest)
    for user in flattened:
        replace(user, made)
    replace(linear, write.view(made, sizes))
    return cast("fx.Node", made)


def _gives_rows(node: fx.Node, linear: fx.Node) -> bool:
    return (
        node.target in _RESHAPES
        and node.args[0] is linear
        and node.meta["val"].dim() == 2
        and node.meta["val"].shape[-1] == linear.meta["val"].shape[-1]
    )
