"""What the cases of ``conform`` are fed with."""

import torch
from torch import nn

import backquant
from backquant.conformance.data import input_grids


class _Stacked(nn.Module):
    def forward(self, x, y):
        return torch.stack([x, y])


def test_inputs_that_share_an_observer_each_have_its_grid():
    """Off it, a tie that the entry to the model rounds otherwise was held against the operator."""
    backend = backquant.get_backend_config("fbgemm")
    example = (torch.randn(2, 3), torch.randn(2, 3))
    mapping = backquant.get_default_qconfig_mapping("fbgemm")
    prepared = backquant.prepare_fx(_Stacked().eval(), mapping, example, backend_config=backend)
    prepared(*example)
    first, second = input_grids(prepared)
    assert first is not None and second is not None
    assert torch.equal(first, second)
