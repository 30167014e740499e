"""Names of nested inputs."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.calibrate.feed import bound_arguments, check_values, described
from backquant.errors import CalibrationError


def test_nested_inputs_are_named():
    model = fx.symbolic_trace(lambda pair, options: pair)
    batch = (
        (torch.ones(1), torch.tensor([float("nan")])),
        {"mask": torch.ones(2, dtype=torch.bool)},
    )
    bound = bound_arguments(model, batch, 4)
    assert described(bound) == "pair[0]: float32[1], pair[1]: float32[1], options.mask: bool[2]"
    with pytest.raises(CalibrationError, match=r"input 'pair\[1\]' of batch 4"):
        check_values(bound, 4)


def test_integers_are_always_finite():
    bound = bound_arguments(fx.symbolic_trace(lambda x: x), torch.arange(3), 0)
    check_values(bound, 0)


class Masked(nn.Module):
    """A mask of zeros and −inf that is added in float."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return (y @ y.transpose(1, 2) + masks[0]).softmax(-1) @ y


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_a_mask_may_hold_minus_infinity(capture):
    torch.manual_seed(0)
    mask = torch.full((5, 5), float("-inf")).triu_(1)
    model, batches = Masked().eval(), [(torch.randn(2, 5, 8), mask) for _ in range(3)]
    result = backquant.quantize(
        model, batches[0], calibration=batches, capture=capture, slower="keep"
    )
    error = (result(*batches[0]) - model(*batches[0])).norm() / model(*batches[0]).norm()
    assert error < 0.05
    endless = (batches[0][0] / 0.0, mask)
    with pytest.raises(CalibrationError, match="infinite values"):
        backquant.quantize(model, batches[0], calibration=[endless], capture=capture)
