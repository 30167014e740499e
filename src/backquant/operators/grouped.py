"""Linear layers of groups of rows: the experts of a mixture (``backquant.graph.grouped``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from backquant.backend_config import BackendPatternConfig, DTypeConfig
from backquant.graph.grouped import grouped_linear
from backquant.operators.entry import admit, functional
from backquant.operators.operator import INPUT, Operator, Sample, Weight


def entries(dtype_configs: Sequence[DTypeConfig]) -> list[BackendPatternConfig]:
    """``grouped_linear(input, weight, offsets)``.

    >>> entries([DTypeConfig()])[0]._input_type_to_index
    {'weight': 1}
    """
    return admit([functional(grouped_linear, weight=1)], dtype_configs)


def _every_group(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Every row by the matrices of all groups, of which one result is taken: no runtime has the loop."""
    rows, groups = input.shape[0], offsets.shape[0]
    made = F.linear(input, weight).reshape(rows, groups, weight.shape[0] // groups)
    group = (torch.arange(rows).unsqueeze(1) >= offsets).sum(1)
    place = group.clamp(max=groups - 1).reshape(rows, 1, 1).expand(rows, 1, made.shape[2])
    taken = made.gather(1, place).squeeze(1)
    return torch.where((group < groups).unsqueeze(1), taken, 0.0)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="grouped_linear",
        family="linear",
        sample=Sample(((5, 8),), call=(INPUT, Weight((12, 8)), torch.tensor((2, 2, 5)))),
        functions=(grouped_linear,),
        weight_index=1,
        weight_channel_axis=0,
        places=(2,),
        portable={grouped_linear: _every_group},
    ),
)
