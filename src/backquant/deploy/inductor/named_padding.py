"""Paddings that a convolution names (``"valid"``, ``"same"``), in numbers.

Inductor (torch 2.13) packs an integer convolution without padding as one that pads nothing at all, not even
with zeros, and its kernel refuses it; and it takes none that pads more behind than in front, as ``"same"``
does with an even kernel. Such a difference is a padding of its own, of the integers.
"""

from __future__ import annotations

from typing import Any

from backquant.deploy.edits import AtenCalls, rewrite
from backquant.deploy.program import Program
from backquant.lower.qdq import is_dequantize
from backquant.operators import overload, overloads

_NAMES = ("conv1d", "conv2d")
_CONVOLUTIONS = {
    each: overload(name, "default")
    for name in _NAMES
    for each in overloads(name)
    if each._overloadname == "padding"
}
_DEFAULTS = (None, 1, "valid", 1, 1)  # bias, stride, padding, dilation, groups


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
    rewrite(program.exported, dict.fromkeys(_CONVOLUTIONS, _number))


def _number(conv: Any, write: AtenCalls) -> Any:
    given: tuple[Any, ...] = (*conv.args, *_DEFAULTS[len(conv.args) - 2 :])
    value, weight, bias, stride, padding, dilation, groups = given
    kernel = list(weight.meta["val"].shape[2:])
    rates = _each(dilation, kernel)
    sums = [0 if padding == "valid" else r * (k - 1) for r, k in zip(rates, kernel, strict=True)]
    more = [total % 2 for total in sums]
    if any(more):
        value = _longer(write, value, more)
    sizes = [total // 2 for total in sums]
    operator = _CONVOLUTIONS[conv.target]
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
