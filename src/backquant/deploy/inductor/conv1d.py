"""1-d convolutions as 2-d ones of height 1.

Inductor packs the weight of an integer 1-d convolution with a height of 1, and the operator's shape function
(torch 2.13, ``meta_qconv_pointwise``) then takes this height for the length of the kernel: the result is said
to be longer than it is, and what reads its shape, such as a group norm, stops. Of 2-d ones it is right.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from backquant.deploy.edits import AtenCalls, before, replace
from backquant.deploy.program import Program
from backquant.lower.qdq import is_channel_dequantize, is_dequantize, is_quantize
from backquant.operators import overload, overloads

_CONVOLUTIONS = overloads("conv1d")
_DEFAULTS = (None, 1, 0, 1, 1)  # bias, stride, padding, dilation, groups
#: What Inductor computes in the same kernel, between a convolution and its quantize node.
_FUSED = overloads("relu", "hardtanh", "hardswish", "silu", "gelu")


def with_height(program: Program) -> None:
    """Write the integer 1-d convolutions of ``program`` so, in ``program`` itself; the values are the same.

    >>> from backquant.deploy.program import export_program
    >>> import torch
    >>> from backquant.graph.decomposed import register_quantized_decomposed
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
    widened: dict[Any, Any] = {}
    for node in list(program.exported.graph.nodes):
        if node.target in _CONVOLUTIONS and _is_integer(node):
            _widen(node, widened)
    program.exported.graph.eliminate_dead_code()
    program.exported.graph_module.recompile()


def _is_integer(conv: fx.Node) -> bool:
    value, weight = conv.args[:2]
    batched = isinstance(value, fx.Node) and value.meta["val"].dim() == 3
    return batched and is_dequantize(value) and is_channel_dequantize(weight)


def _widen(conv: Any, widened: dict[Any, Any]) -> None:
    """Integers are widened, and the height goes after what is fused with the convolution.

    ``widened``: those that are already, so that layers that share a weight share one of height 1, and
    ``made_fusible`` sees that they do.
    """
    given: tuple[Any, ...] = (*conv.args, *_DEFAULTS[len(conv.args) - 2 :])
    value, weight, bias, stride, padding, dilation, groups = given
    named = isinstance(padding, str)
    sizes = (_pair(stride, 1), padding if named else _pair(padding, 0), _pair(dilation, 1), groups)
    operator = overload("conv2d", "padding" if named else "default")
    made = before(
        conv, operator, (*(_widened(conv, read, widened) for read in (value, weight)), bias, *sizes)
    )
    last = conv
    while (user := _fused_reader(last)) is not None:
        made = before(user, user.target, (made, *user.args[1:]), **user.kwargs)
        last = user
    replace(last, AtenCalls(last).squeeze(made, -2))


def _widened(conv: fx.Node, dequantize: Any, widened: dict[Any, Any]) -> Any:
    """What ``dequantize`` gives, of height 1: the integers are."""
    integers, *qparams = dequantize.args
    write = AtenCalls(conv)
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
