"""Models that write their parameters when they are called: the user's stay, and the copy settles."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import backquant
from backquant.graph import check_inputs
from backquant.graph.settle import WritesParameterError, unwritten_parameters


class Rescaled(nn.Module):
    """As RWKV: the first call in evaluation mode divides a weight, in place, and says that it is done."""

    def __init__(self, *, at_each_call: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.at_each_call, self.is_rescaled = at_each_call, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at_each_call or not self.is_rescaled:
            with torch.no_grad():
                self.second.weight.div_(4)
            self.is_rescaled = True
        return self.second(torch.relu(self.first(x)))


def same(one: nn.Module, other: nn.Module) -> bool:
    tensors = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_what_is_quantized_has_settled_and_the_model_is_as_it_was(capture: str) -> None:
    torch.manual_seed(0)
    model, x = Rescaled().eval(), torch.randn(32, 8)
    before, wanted = copy.deepcopy(model), copy.deepcopy(model)(x)
    quantized = backquant.quantize(model, backend="x86", calibration=[x, x], capture=capture)
    assert same(model, before) and not model.is_rescaled
    assert quantized.report.coverage == 1.0
    for _ in range(2):
        noise = (quantized(x) - wanted).square().sum()
        assert 10 * torch.log10(wanted.square().sum() / noise) > 25


def test_explain_and_prepare_leave_it_as_it_was() -> None:
    model, x = Rescaled().eval(), torch.randn(4, 8)
    before = copy.deepcopy(model)
    assert backquant.explain(model, x).coverage == 1.0
    mapping = backquant.get_default_qconfig_mapping("x86")
    with pytest.raises(WritesParameterError, match=r"changes its parameter 'second\.weight'"):
        backquant.prepare_fx(model, mapping, (x,))
    assert same(model, before) and not model.is_rescaled
    model(x)  # as the fix says
    prepared = backquant.prepare_fx(model, mapping, (x,))
    torch.testing.assert_close(prepared(x), model(x))


def test_a_model_that_writes_at_each_call_is_refused() -> None:
    model, x = Rescaled(at_each_call=True).eval(), torch.randn(4, 8)
    before = copy.deepcopy(model)
    with pytest.raises(WritesParameterError, match=r"changes its parameter 'second\.weight'"):
        backquant.quantize(model, backend="x86", calibration=[x])
    assert same(model, before)


def test_views_and_lists_of_parameters_are_parameters() -> None:
    model = nn.Linear(4, 4)
    weight = model.weight.detach()
    with unwritten_parameters(model):
        for write in (
            lambda: weight.view(-1)[2:].fill_(0.0),
            lambda: torch._foreach_mul_([torch.ones(1), weight], 2.0),
            lambda: torch.add(weight, 1, out=weight),
        ):
            with pytest.raises(WritesParameterError):
                write()
        assert torch.ones(2).mul_(2).sum() == 4


def test_buffers_are_written_in_a_copy() -> None:
    norm = nn.BatchNorm1d(3).train()
    check_inputs(norm, torch.randn(4, 3))
    assert norm.num_batches_tracked == 0
