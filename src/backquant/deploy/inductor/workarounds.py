"""What Inductor (torch 2.13) compiles wrong, and what it is passed instead."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from backquant.deploy.edits import AtenCalls, arguments, before, operands, replace, rewrite
from backquant.deploy.program import Program
from backquant.graph import copied_graph
from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize
from backquant.nn.quantized.reference.integer_weights import IntegerWeights
from backquant.operators import overload, overloads

# 1-d convolutions as 2-d ones of height 1.
#
# Inductor packs the weight of an integer 1-d convolution with a height of 1, and the operator's shape
# function (torch 2.13, ``meta_qconv_pointwise``) then takes this height for the length of the kernel: the
# result is said to be longer than it is, and what reads its shape, such as a group norm, stops. Of 2-d
# ones it is right.
_CONVOLUTIONS = overloads("conv1d")

#: What Inductor computes in the same kernel, between a convolution and its quantize node.
_FUSED = overloads("relu", "hardtanh", "hardswish", "silu", "gelu")


def with_height(program: Program) -> None:
    """Write the integer 1-d convolutions of ``program`` so, in ``program`` itself; the values are the same.

    >>> from backquant.deploy.program import export_program
    >>> import torch
    >>> from backquant.graph.dialect_ops import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> ops = torch.ops.quantized_decomposed
    >>> def layer(q, weight, scales, zeros):
    ...     x = ops.dequantize_per_tensor(q, 0.1, 0, 0, 255, torch.uint8)
    ...     return torch.conv1d(
    ...         x, ops.dequantize_per_channel(weight, scales, zeros, 0, -127, 127, torch.int8)
    ...     )
    >>> weight = torch.ones(2, 1, 3, dtype=torch.int8), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    >>> given = (torch.zeros(1, 1, 8, dtype=torch.uint8), *weight)
    >>> made = export_program(fx.symbolic_trace(layer), given, {}, None)
    >>> with_height(made)
    >>> [node.name for node in made.exported.graph.nodes if "conv" in node.name or "queeze" in node.name]
    ['unsqueeze_default', 'unsqueeze_default_1', 'conv2d_default', 'squeeze_dim']
    """
    rewrite(program.exported, dict.fromkeys(_CONVOLUTIONS, partial(_widen, {})))


def _is_integer(conv: fx.Node) -> bool:
    value, weight = conv.args[:2]
    batched = isinstance(value, fx.Node) and value.meta["val"].dim() == 3
    return batched and is_dequantize(value) and is_channel_dequantize(weight)


def _widen(widened: dict[Any, Any], conv: fx.Node, write: AtenCalls) -> None:
    """Integers are widened, and the height goes after what is fused with the convolution.

    ``widened``: those that are already, so that layers that share a weight share one of height 1, and
    ``made_fusible`` sees that they do.
    """
    if not _is_integer(conv):
        return
    value, weight, bias, stride, padding, dilation, groups = arguments(conv).values()
    named = isinstance(padding, str)
    sizes = (_pair(stride, 1), padding if named else _pair(padding, 0), _pair(dilation, 1), groups)
    operator = overload("conv2d", "padding" if named else "default")
    read = (_widened(write, each, widened) for each in (value, weight))
    made = write.call(operator, *read, bias, *sizes)
    last = conv
    while (user := _fused_reader(last)) is not None:
        made = before(user, user.target, (made, *user.args[1:]), **user.kwargs)
        last = user
    replace(last, AtenCalls(last).squeeze(made, -2))


def _widened(write: AtenCalls, dequantize: Any, widened: dict[Any, Any]) -> Any:
    """What ``dequantize`` gives, of height 1: the integers are."""
    integers, *qparams = dequantize.args
    if integers not in widened:
        widened[integers] = write.unsqueeze(integers, 2)
    return write.call(dequantize.target, widened[integers], *qparams)


def _fused_reader(node: fx.Node) -> Any:
    """The only reader of ``node``, where it quantizes its value or is an activation that is."""
    if len(node.users) != 1 or is_quantize(node):
        return None
    [user] = node.users
    if is_quantize(user):
        return user
    return user if user.target in _FUSED and _fused_reader(user) is not None else None


def _pair(size: Any, narrow: int) -> list[Any]:
    """``size`` of the length, with ``narrow`` for the height."""
    return [narrow, size[0] if isinstance(size, (list, tuple)) else size]


# Scales measured at each call, which Inductor takes from ranges that need not hold zero.
#
# Its decomposition of ``choose_qparams`` (torch 2.13, ``_inductor/decomposition.py``) divides the largest
# less the smallest value by the number of steps, and clamps the zero point: values on one side of zero
# saturate, such as those behind a sigmoid. So it reads the two ends of the range that holds zero, which
# is what the operator itself computes from.
def hold_zero(program: Program) -> None:
    """Let each ``choose_qparams`` in ``program`` itself read the ends of a range with zero in it.

    >>> from backquant.deploy.program import export_program
    >>> register_quantized_decomposed()
    >>> def scale(x):
    ...     return torch.ops.quantized_decomposed.choose_qparams(x, 0, 255, 1e-7, torch.uint8)[0]
    >>> made = export_program(fx.symbolic_trace(scale), (torch.ones(8),), {}, None)
    >>> hold_zero(made)
    >>> [node.name for node in made.exported.graph.nodes][1:6]
    ['amin_default', 'clamp_max_default', 'amax_default', 'clamp_min_default', 'stack_default']
    """
    register_quantized_decomposed()
    rewrite(program.exported, {torch.ops.quantized_decomposed.choose_qparams.tensor: _read_ends})


def _read_ends(node: fx.Node, write: AtenCalls) -> None:
    value = operands(node)[0]
    low, high = write.clamp_max(write.amin(value), 0), write.clamp_min(write.amax(value), 0)
    node.replace_input_with(value, write.stack([low, high]))


# Max pooling in ceil mode, which Inductor's integer max pooling reads as floor mode.
#
# Its pattern (torch 2.13, ``_register_quantization_maxpool2d``) takes the argument ``ceil_mode`` for the
# ``offset_dtype`` of another form, and drops it: results are a row and a column short. So the pooling reads
# the dequantized value through a clamp that changes no value. The pattern does not contain it, and the
# code that is generated instead is right.


def keep_ceil_mode(program: Program) -> None:
    """Put such a bound, in ``program`` itself, between a dequantize node and each pooling in ceil mode.

    >>> import torch
    >>> from backquant.deploy.program import export_program
    >>> from backquant.graph.dialect_ops import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> def pooled(q):
    ...     x = torch.ops.quantized_decomposed.dequantize_per_tensor(q, 0.1, 0, 0, 255, torch.uint8)
    ...     return torch.max_pool2d(x, 3, 2, ceil_mode=True)
    >>> integers = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    >>> made = export_program(fx.symbolic_trace(pooled), (integers,), {}, None)
    >>> keep_ceil_mode(made)
    >>> [node.name for node in made.exported.graph.nodes]
    ['q', 'dequantize_per_tensor', 'clamp_min_default', 'max_pool2d', 'output']
    """
    rewrite(program.exported, {overload("max_pool2d"): _pool_bounded})


def _pool_bounded(node: fx.Node, write: AtenCalls) -> None:
    value = operands(node)[0]
    if arguments(node)["ceil_mode"] and is_dequantize(value):
        _, scale, zero_point, low, _, _ = value.args
        node.replace_input_with(value, write.clamp_min(value, (low - zero_point - 1) * scale))


# Dequantize nodes that Inductor keeps apart.
#
# Inductor merges equal dequantize nodes, and its matcher of linear layers (torch 2.13,
# ``_register_dequant_promotion``) then overlooks those that share their input with each other and with
# anything else, as query, key and value do beside a residual addition: the reshape in between has several
# users, and is looked at before its own input was divided. So operators without a weight read a dequantize
# node that differs in a bound, which the operator does not use (its docstring says so).
def split_dequantize(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``module`` in which readers without a weight have dequantize nodes that equal no other.

    >>> from torch import nn
    >>> split_dequantize(fx.symbolic_trace(nn.Identity())).graph.find_nodes(op="output")
    [output]
    """
    made = fx.GraphModule(module, copied_graph(module.graph))
    for node in list(made.graph.nodes):
        if not is_dequantize(node):
            continue
        weighted = [user for user in node.users if reads_weight(made, user)]
        others = [user for user in node.users if user not in weighted]
        if not weighted or not others:
            continue
        tensor, scale, zero_point, low, high, dtype = node.args
        with made.graph.inserting_after(node):
            own = made.graph.call_function(
                node.target, (tensor, scale, zero_point, low - 1, high, dtype)
            )
        for user in others:
            user.replace_input_with(node, own)
    made.recompile()
    return made


def reads_weight(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether ``node`` computes with an integer weight.

    >>> from torch import nn
    >>> module = fx.symbolic_trace(nn.Identity())
    >>> [reads_weight(module, node) for node in module.graph.nodes]
    [False, False]
    """
    if node.op == "call_module":
        parts = module.get_submodule(str(node.target)).modules()
        return any(isinstance(part, IntegerWeights) for part in parts)
    return any("dequantize_per_channel" in str(arg.target) for arg in node.all_input_nodes)


# Float transposed convolutions, into which Inductor folds constants along the wrong axis.
#
# Its binary folding (torch 2.13, ``_inductor/fx_passes/binary_folding.py``) takes the first axis of the
# weight for the output channels, which of a transposed convolution are the second: where there are as
# many inputs as outputs, a batch norm behind it scales the inputs. So a clamp that changes no value is
# put in between.
_TRANSPOSED = overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def keep_transposed(program: Program) -> None:
    """Put such a bound, in ``program`` itself, behind each transposed convolution.

    >>> import torch
    >>> from torch import fx
    >>> from backquant.deploy.program import export_program
    >>> layer = fx.symbolic_trace(lambda x, weight: torch.conv_transpose1d(x, weight))
    >>> made = export_program(layer, (torch.zeros(1, 1, 4), torch.ones(1, 1, 2)), {}, None)
    >>> keep_transposed(made)
    >>> [node.name for node in made.exported.graph.nodes]
    ['x', 'weight', 'conv_transpose1d', 'clamp_min_default', 'output']
    """
    graph = program.exported.graph
    for node in [node for node in graph.nodes if node.target in _TRANSPOSED]:
        with graph.inserting_after(node):
            bounded = graph.call_function(overload("clamp_min"), (node, -math.inf))
        bounded.meta = dict(node.meta)
        node.replace_all_uses_with(bounded, delete_user_cb=lambda user, b=bounded: user is not b)
    program.exported.graph_module.recompile()


# Paddings that a convolution names (``"valid"``, ``"same"``), in numbers.
#
# Inductor (torch 2.13) packs an integer convolution without padding as one that pads nothing at all, not even
# with zeros, and its kernel refuses it; and it takes none that pads more behind than in front, as ``"same"``
# does with an even kernel. Such a difference is a padding of its own, of the integers.

_PADDED_CONVOLUTIONS = {overload(name, "padding"): overload(name) for name in ("conv1d", "conv2d")}


def number_paddings(program: Program) -> None:
    """Write the named paddings of ``program`` as numbers, in ``program`` itself; the values are the same.

    >>> import torch
    >>> from torch import fx
    >>> from backquant.deploy.program import export_program
    >>> layer = fx.symbolic_trace(lambda x, weight: torch.conv1d(x, weight, padding="same"))
    >>> made = export_program(layer, (torch.zeros(1, 1, 4), torch.ones(1, 1, 2)), {}, None)
    >>> number_paddings(made)
    >>> [node.name for node in made.exported.graph.nodes]
    ['x', 'weight', 'constant_pad_nd_default', 'conv1d_default', 'output']
    """
    rewrite(program.exported, dict.fromkeys(_PADDED_CONVOLUTIONS, _number))


def _number(conv: fx.Node, write: AtenCalls) -> Any:
    value, weight, bias, stride, padding, dilation, groups = arguments(conv).values()
    kernel = list(weight.meta["val"].shape[2:])
    rates = _each(dilation, kernel)
    sums = [0 if padding == "valid" else r * (k - 1) for r, k in zip(rates, kernel, strict=True)]
    more = [total % 2 for total in sums]
    if any(more):
        value = _longer(write, value, more)
    sizes = [total // 2 for total in sums]
    operator = _PADDED_CONVOLUTIONS[conv.target]
    return write.call(operator, value, weight, bias, _each(stride, kernel), sizes, rates, groups)


def _each(size: Any, kernel: list[int]) -> list[Any]:
    sizes = list(size) if isinstance(size, (list, tuple)) else [size]
    return sizes * len(kernel) if len(sizes) == 1 else sizes


def _longer(write: AtenCalls, value: Any, more: list[int]) -> Any:
    """``value`` with ``more`` zeros behind each axis; of a dequantized one the integers have them."""
    pads = [number for size in reversed(more) for number in (0, size)]
    if not is_dequantize(value):
        return write.constant_pad_nd(value, pads)
    integers, scale, zero_point, *rest = value.args
    longer = write.constant_pad_nd(integers, pads, zero_point)
    return write.call(value.target, longer, scale, zero_point, *rest)


# Integer convolutions of one channel, where a size is free, read a second channel whose weights are zero.
#
# oneDNN's kernel gives wrong numbers there (torch 2.13; of digits and of sounds, 0 dB): with one channel, all
# orders in memory have the same strides. A weight of zero adds nothing, whatever it is multiplied with.

_ONE_CHANNEL_CONVOLUTIONS = overloads("conv2d", "conv3d")


def with_two_channels(program: Program) -> None:
    """Write those convolutions of ``program`` so, in ``program`` itself; the values are the same.

    >>> import torch
    >>> from backquant.deploy.program import export_program
    >>> model = fx.symbolic_trace(torch.nn.Conv2d(1, 2, 3))
    >>> program = export_program(model, (torch.ones(1, 1, 4, 4),), {}, None)
    >>> with_two_channels(program)  # no integers
    >>> [n.name for n in program.exported.graph.nodes if n.op == "call_function"]
    ['conv2d']
    """
    widened: dict[Any, Any] = {}

    def widen(node: fx.Node, write: AtenCalls) -> None:
        for value in operands(node)[:2] if _is_meant(node) else ():
            node.replace_input_with(value, _second_channel(write, value, widened))

    rewrite(program.exported, dict.fromkeys(_ONE_CHANNEL_CONVOLUTIONS, widen))


def _is_meant(node: fx.Node) -> bool:
    value, weight = node.args[:2]
    if not (is_dequantize(value) and is_channel_dequantize(weight)):
        return False
    shape = value.meta["val"].shape  # type: ignore[union-attr]
    is_free = any(not isinstance(size, int) for size in shape)
    return bool(is_free and shape[1] == 1 and arguments(node)["groups"] == 1)


def _second_channel(write: AtenCalls, dequantize: Any, widened: dict[Any, Any]) -> Any:
    """What ``dequantize`` gives, with a second channel of the integer zero."""
    integers, *qparams = dequantize.args
    if integers not in widened:
        behind = [0] * (2 * integers.meta["val"].dim() - 3)
        widened[integers] = write.constant_pad_nd(integers, [*behind[1:], 0, 1], 0)
    return write.call(dequantize.target, widened[integers], *qparams)
