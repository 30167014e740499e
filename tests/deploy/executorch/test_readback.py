"""The file itself, independently of how it was made."""

from __future__ import annotations

import torch
from torch import nn

from backquant.deploy.executorch.target import read_back
from backquant.graph.silence import quiet


def test_float_program() -> None:
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
        edge = to_edge_transform_and_lower(
            torch.export.export(net, (torch.randn(2, 4),)), partitioner=[XnnpackPartitioner()]
        )
        found = read_back(edge.to_executorch().buffer)
    [[linear]] = found.delegates
    assert (linear.kind, linear.dtype, linear.is_integer) == ("FullyConnected", "float32", False)
    assert found.portable == ("aten::native_layer_norm.out",)
