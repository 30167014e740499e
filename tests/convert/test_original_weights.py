"""Beside PyTorch's: tests/api/custom/test_convert.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from backquant.convert import convert_to_reference, original_weights


def lookup(flow, model, x):
    prepared = flow.prepare(model.eval())
    prepared(x)
    return original_weights(prepared, convert_to_reference(prepared))


def test_batch_norms_are_folded_in(flow):
    conv, bn = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)
    bn.running_var.uniform_(0.5, 2)
    found = lookup(flow, nn.Sequential(conv, bn, nn.ReLU()), torch.randn(1, 3, 4, 4))
    (weight, bias) = found["0"]
    scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
    torch.testing.assert_close(weight, conv.weight * scale.reshape(-1, 1, 1, 1))
    assert bias is not None


def test_keywords_and_computed_weights(flow):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            x = F.linear(x, weight=self.w, bias=self.b)
            x = F.linear(x, 2 * self.w)
            return F.linear(x, x)

    model = Net()
    found = lookup(flow, model, torch.randn(4, 4))
    assert list(found)[:2] == ["_packed_weight_0", "_packed_weight_1"]
    assert torch.equal(found["_packed_weight_0"][0], model.w)
    assert torch.equal(found["_packed_weight_0"][1], model.b)
    assert torch.equal(found["_packed_weight_1"][0], 2 * model.w)
    assert found["_packed_weight_1"][1] is None
    assert not found["_packed_weight_0"][0].requires_grad


def test_modules_without_weights_have_none(flow):
    assert lookup(flow, nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(1, 3, 4, 4)) == {}
