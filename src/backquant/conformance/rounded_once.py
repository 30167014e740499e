"""The reference models of kernels that add before they round: a convolution with an addition in one kernel.

The description has two operators with a tensor of 8 bits between them, which such a kernel never makes
(kernels that do this are named ``rounds once``). What would saturate there does not, unless the kernel clamps
it in float (``saturates, rounds once``: OpenVINO's).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from backquant.convert import convert_to_reference
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.operators import spellings


def rounded_once(reference: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """``reference`` once for each addend of an addition that nothing else reads, which stays float in it."""
    for made, addend in _addends(reference):
        addend.replace_all_uses_with(addend.args[0].args[0])
        made.recompile()
        yield made


def saturated_and_rounded_once(reference: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The same, with the addend clamped to the range of its integers."""
    for made, addend in _addends(reference):
        value, scale, zero_point, least, most, *_ = addend.args[0].args
        bounds = ((least - zero_point) * scale, (most - zero_point) * scale)
        with made.graph.inserting_before(addend):
            clamped = made.graph.call_function(torch.clamp, (value, *bounds))
        addend.replace_all_uses_with(clamped)
        made.recompile()
        yield made


def references_behind(kernels: Sequence[str], prepared: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The reference models of ``prepared`` for kernels that say of themselves that they round once."""
    once = [kernel for kernel in kernels if "rounds once" in kernel]
    saturating = [kernel for kernel in once if "saturates" in kernel]
    if len(once) > len(saturating):
        yield from rounded_once(convert_to_reference(prepared))
    if saturating:
        yield from saturated_and_rounded_once(convert_to_reference(prepared))


def _addends(reference: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Any]]:
    """Copies of ``reference``, each with the node that dequantizes one addend that nothing else reads."""
    for number, node in enumerate(reference.graph.nodes):
        if node.target not in spellings("add"):
            continue
        for place, read in enumerate(node.all_input_nodes):
            if _is_alone(read):
                made = copy.deepcopy(reference)
                yield made, list(made.graph.nodes)[number].all_input_nodes[place]


def _is_alone(node: fx.Node) -> bool:
    """Whether ``node`` dequantizes integers that only it reads, and one operator reads its floats."""
    if not is_dequantize(node) or len(node.users) != 1:
        return False
    integers: Any = node.args[0]
    return is_quantize(integers) and len(integers.users) == 1
