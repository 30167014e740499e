"""How the tensors of Inductor's graph lie in memory, for kernels that read them in one order only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backquant.runtime.compiled.inductor import V, ir

CHANNELS_LAST = (0, 2, 3, 1)


def value_of(item: Any) -> torch.Tensor:
    """A constant of the graph."""
    item.realize()
    found: torch.Tensor = V.graph.constants[item.get_name()]
    return found


def _is_plain(size: Sequence[Any], stride: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether elements lie without holes, the dimensions in the given order (the innermost last)."""
    step: Any = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != step:
            return False
        step = step * size[dim]
    return True


def laid_out(x: Any, order: Sequence[int]) -> Any:
    """``x`` in memory without holes or offset, in the given order of dimensions."""
    places = [0] * len(order)
    for place, dim in enumerate(reversed(order)):
        places[dim] = place
    x = ir.ExternKernel.require_stride_order(ir.ExternKernel.realize_input(x), places)
    layout = x.get_layout()
    if layout.offset == 0 and _is_plain(x.get_size(), x.get_stride(), order):
        return x
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.copy_input(x), places)


def is_known(*sizes: Any) -> bool:
    """Whether sizes are numbers, not names of any size."""
    return all(isinstance(size, int) or size.is_number for size in sizes)


def hint(size: Any) -> int:
    """The size in the example."""
    return int(V.graph.sizevars.optimization_hint(size))
