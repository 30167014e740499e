"""Integer convolutions of one channel, where a size is free, read a second channel whose weights are zero.

oneDNN's kernel gives wrong numbers there (torch 2.13; of digits and of sounds, 0 dB): with one channel, all
orders in memory have the same strides. A weight of zero adds nothing, whatever it is multiplied with.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from backquant.deploy.edits import AtenCalls, rewrite
from backquant.deploy.program import Program
from backquant.lower.qdq import is_channel_dequantize, is_dequantize
from backquant.operators import overloads

_CONVOLUTIONS = overloads("conv2d", "conv3d")
_GROUPS = 6  # the place of the argument


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

    def widen(node: Any, write: AtenCalls) -> None:
        for value in node.args[:2] if _is_meant(node) else ():
            node.replace_input_with(value, _widened(write, value, widened))

    rewrite(program.exported, dict.fromkeys(_CONVOLUTIONS, widen))


def _is_meant(node: fx.Node) -> bool:
    value, weight = node.args[:2]
    if not (is_dequantize(value) and is_channel_dequantize(weight)):
        return False
    shape = value.meta["val"].shape  # type: ignore[union-attr]
    in_groups = len(node.args) > _GROUPS and node.args[_GROUPS] != 1
    is_free = any(not isinstance(size, int) for size in shape)
    return bool(is_free and shape[1] == 1 and not in_groups)


def _widened(write: AtenCalls, dequantize: Any, widened: dict[Any, Any]) -> Any:
    """What ``dequantize`` gives, with a second channel of the integer zero."""
    integers, *qparams = dequantize.args
    if integers not in widened:
        behind = [0] * (2 * integers.meta["val"].dim() - 3)
        widened[integers] = write.constant_pad_nd(integers, [*behind[1:], 0, 1], 0)
    return write.call(dequantize.target, widened[integers], *qparams)
