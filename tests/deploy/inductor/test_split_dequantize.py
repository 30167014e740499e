"""Dequantize nodes for weighted operators and for others."""

from __future__ import annotations

import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.inductor.workarounds import split_dequantize
from backquant.deploy.portable import portable
from backquant.lower.qdq import is_dequantize


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) + self.third(x) + x


def test_the_addition_reads_another_node_of_the_same_value() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    config = backquant.get_backend_config("inductor_x86").set_qdq(None)
    model = backquant.quantize(Residual().eval(), backend=config, calibration=[x])
    module = portable(model.graph_module, QDQRules())
    apart = split_dequantize(module)
    shared = [n for n in module.graph.nodes if is_dequantize(n) and len(n.users) == 3]
    assert len(shared) == 1
    linear, addition = [
        n
        for n in apart.graph.nodes
        if is_dequantize(n) and n.args[0].name == shared[0].args[0].name
    ]
    assert {user.name for user in linear.users} == {"second", "third"}
    assert len(addition.users) == 1
    assert linear.args[:3] == addition.args[:3]
    assert linear.args[3] == addition.args[3] + 1  # the bound, which the operator does not use
    assert torch.equal(apart(x), model(x))
    assert len(module.graph.nodes) == len(apart.graph.nodes) - 1
