"""Images as files hold them are refused with what to do: bytes, channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import InputError

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["images.float() / 255"]),
        (torch.zeros(2, 8, 8, 3), ["images.permute(0, 3, 1, 2)"]),
        (
            torch.zeros(2, 8, 8, 3, dtype=torch.uint8),
            ["images.permute(0, 3, 1, 2)", "images.float() / 255"],
        ),
        (torch.zeros(2, 3, 9, 9), ["forward takes (input"]),
    ],
)
def test_the_fix_is_of_what_is_wrong(images: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        backquant.quantize(MODEL, calibration=[images])
    assert [word for word in words if word not in raised.value.fix] == []
