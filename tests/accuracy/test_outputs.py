"""What samples add to the loss, where values decide how large outputs are (transformers' VITS: predicted
speech; detectors): ``quantize`` ended with an error of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.accuracy import outputs
from backquant.accuracy.figures import MOST_LOSS
from backquant.accuracy.outputs import FloatOutputs, losses_of


@pytest.mark.parametrize(
    ("found", "noise"),
    [
        (torch.ones(2, 3), [4.0, 4.0]),  # one of three wanted values is not there
        (torch.ones(2, 5), [4.0, 4.0]),  # one too many
        (torch.ones(1, 4), [0.0, 16.0]),
        (torch.ones(3, 4), [0.0, 0.0]),
        (torch.ones(2, 2, 2), [MOST_LOSS * 16, MOST_LOSS * 16]),
    ],
)
def test_what_one_lacks_is_zero_to_the_other(found: torch.Tensor, noise: list[float]) -> None:
    wanted = torch.full((2, 4), 2.0)
    found = found if found.dim() == 3 else found * 2
    losses = losses_of([[wanted]], [[found]])
    torch.testing.assert_close(losses, torch.tensor(noise, dtype=torch.float64) / 32)


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_outputs_are_held_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_BYTES", 2 * 4 * 3 * 4)  # of two batches
    model, other = Counted(2, 3), nn.Linear(2, 3)
    batches = [torch.randn(4, 2) for _ in range(3)]
    held = FloatOutputs(model, batches)
    first = held.losses(other, "comparing")
    assert torch.equal(held.losses(other, "comparing"), first)
    assert model.calls == 3 + 1  # the third batch once more
    assert len(first) == 12
