"""Weights in groups of a row, as ``quantized_decomposed`` spells them."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from backquant.dtypes import block_of
from backquant.lower.qdq import is_block_dequantize

__all__ = ["spell_groups"]


def spell_groups(exported: ExportedProgram) -> None:
    """``dequantize_blocks`` of a matrix in groups of a row as ``dequantize_per_channel_group``, in place."""
    ops = torch.ops.quantized_decomposed
    for node in exported.graph.nodes:
        if not is_block_dequantize(node):
            continue
        weight, scale, zero_point = node.args
        block = block_of(weight.meta["val"].shape, scale.meta["val"].shape) or ()
        dtype = weight.meta["val"].dtype
        bounds = (-8, 7) if dtype == torch.int8 else (0, 15)
        if len(block) == 2 and block[0] == 1 and block[1] > 1:
            node.target = ops.dequantize_per_channel_group.default
            node.args = (weight, scale, zero_point, *bounds, dtype, block[1], torch.float32)
    exported.graph_module.recompile()
