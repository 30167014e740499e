"""Sums of bags of embeddings as operators that every runtime has: a gather, and sums by bag.

OpenVINO does not take what the ONNX exporter makes of ``embedding_bag``, and ExecuTorch has no kernel for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.program import Program, origins_of_stacks
from backquant.graph.quiet import quiet

__all__ = ["without_bags"]

_aten = torch.ops.aten
_SUM, _MEAN = 0, 1


def without_bags(program: Program) -> Program:
    """``program`` with each ``embedding_bag`` taken apart; the same object where there is none.

    >>> from backquant.deploy.program import export_program
    >>> made = export_program(torch.fx.symbolic_trace(torch.nn.ReLU()), (torch.zeros(2),), {}, None)
    >>> without_bags(made) is made
    True
    """
    if not any(node.target in _TABLE for node in program.exported.graph.nodes):
        return program
    with quiet(), torch.no_grad():
        exported = program.exported.run_decompositions(dict(_TABLE))
    return replace(program, exported=exported, origins=origins_of_stacks(exported.graph))


def _embedding_bag(  # size: the arguments of the operator
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,  # noqa: ARG001  training only
    mode: int = _SUM,
    sparse: bool = False,  # noqa: ARG001  training only
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``aten::embedding_bag``, but for the last of its results, which only training reads."""
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    starts = offsets[:-1] if include_last_offset else offsets
    begun = torch.zeros(indices.shape[0] + 1, dtype=torch.int64)
    begun = begun.scatter_add(0, starts.long(), torch.ones_like(starts).long())
    bag = begun.cumsum(0)[:-1] - 1
    counted = torch.ones_like(bag)
    if padding_idx is not None and padding_idx >= 0:
        counted = (indices != padding_idx).long()
    sizes = torch.zeros_like(starts).long().scatter_add(0, bag, counted)
    target = bag.unsqueeze(1).expand_as(rows)
    empty = weight.new_zeros((starts.shape[0], weight.shape[1]))
    is_counted = counted.to(rows.dtype).unsqueeze(1)
    if mode in (_SUM, _MEAN):
        out = empty.scatter_add(0, target, rows * is_counted)
        if mode == _MEAN:
            out = out / sizes.clamp(min=1).to(out.dtype).unsqueeze(1)
    else:
        least = torch.finfo(rows.dtype).min
        lowered = torch.where(is_counted > 0, rows, least)
        out = (empty + least).scatter_reduce(0, target, lowered, "amax")
        out = torch.where(sizes.unsqueeze(1) > 0, out, 0.0)
    return out, bag, sizes, bag


_TABLE: dict[Any, Any] = {
    _aten.embedding_bag.default: _embedding_bag,
    _aten.embedding_bag.padding_idx: _embedding_bag,
    _aten._embedding_bag.default: _embedding_bag,
    _aten._embedding_bag_forward_only.default: _embedding_bag,
}
