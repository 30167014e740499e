"""Batch norms that are written as functions behind convolutions are fused as modules are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.graph import GraphRewriter, capture
from backquant.graph.shapes import GraphValues
from backquant.operators.normal_form import batch_norm_module


class NormAct(nn.BatchNorm2d):
    """Calls the function on its own tensors, as classes of other libraries do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.ndim == 4, "a batch of images")
        mean, var = self.running_mean, self.running_var
        training = mean is None and var is None
        x = F.batch_norm(x, mean, var, self.weight, self.bias, training, 0.1, self.eps)
        return F.relu(x)


class Block(nn.Module):
    def __init__(self, affine: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "norm": NormAct(4, affine=affine)})
        self.alone = NormAct(4)
        for norm in (self.first["norm"], self.alone):
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alone(F.max_pool2d(self.first["norm"](self.first["conv"](x)), 2))


def _statistics(norm: nn.BatchNorm2d) -> tuple[Any, ...]:
    return norm.running_mean, norm.running_var, norm.weight, norm.bias


def test_one_behind_a_convolution_is_a_module() -> None:
    for affine in (True, False):
        model, x = Block(affine).eval(), torch.randn(2, 3, 8, 8)
        captured = capture(model, decomposition=None)
        module, scopes = captured.module, captured.scopes
        values = GraphValues(module, x)
        assert GraphRewriter(module, scopes, values, {F.batch_norm}).apply(batch_norm_module) == 0
        assert GraphRewriter(module, scopes).apply(batch_norm_module) == 0  # of an unknown rank
        assert GraphRewriter(module, scopes, values).apply(batch_norm_module) == 1
        assert torch.equal(captured.module(x), model(x))
        if affine:  # the tensors of the model, and no copies
            held = {id(tensor) for tensor in captured.module.state_dict(keep_vars=True).values()}
            assert id(model.first["norm"].weight) in held


def test_statistics_that_change_stay() -> None:
    module = capture(Block(True).eval()).module
    [norm, _] = module.graph.find_nodes(op="call_function", target=F.batch_norm)
    with module.graph.inserting_before(norm):
        module.graph.call_method("add_", (norm.args[1], 1))
    assert (
        GraphRewriter(module, values=GraphValues(module, torch.zeros(2, 3, 8, 8))).apply(
            batch_norm_module
        )
        == 0
    )


def test_one_over_another_axis_stays() -> None:
    """Of an image without a batch the batch norm's axis is the height, here as many as the channels."""
    parts = Block(True).first.eval()
    parts["norm"].forward = lambda x: F.batch_norm(x, *_statistics(parts["norm"]))
    module, x = capture(nn.Sequential(*parts.values())).module, torch.randn(3, 6, 8)
    assert GraphRewriter(module, values=GraphValues(module, x)).apply(batch_norm_module) == 0
    assert GraphRewriter(module, values=GraphValues(module, x[None])).apply(batch_norm_module) == 1


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_it_is_fused(capture: str) -> None:
    model, x = Block(True).eval(), torch.randn(2, 3, 8, 8)
    quantized = backquant.quantize(
        model, x, backend="x86", calibration=[x], slower="keep", capture=capture
    )
    [row] = [row for row in quantized.report.rows if row.multiply_adds]
    assert (row.operator, row.outcome) == ("ConvReLU2d", "quantized"), row
