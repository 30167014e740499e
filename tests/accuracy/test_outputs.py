"""What samples add to the loss, where values decide how large outputs are (transformers' VITS: predicted
speech; detectors): ``quantize`` ended with an error of torch."""

from __future__ import annotations

import pytest
import torch

from backquant.accuracy.figures import MOST_LOSS
from backquant.accuracy.outputs import losses_of


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
