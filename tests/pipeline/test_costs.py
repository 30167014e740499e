"""What is told where a captured graph fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError


class Mapped(nn.Module):
    """A mask of a mapped function that reads a tensor of its own, as transformers make those of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, flag: torch.Tensor | None = None) -> torch.Tensor:
        def near(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (i // 2 - torch.div(j, 2, rounding_mode="floor")).abs() <= torch.tensor(1)

        both = torch.vmap(torch.vmap(near, (None, 0)), (0, None))
        places = torch.arange(x.shape[0])
        return self.fc(x) * both(places, places).sum()


def test_mapped_functions_are_told_in_our_words() -> None:
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    with pytest.raises(CaptureError) as told:
        backquant.prepare_qat_fx(Mapped().train(), mapping, torch.randn(3, 4))
    assert told.value.what.endswith("torch.vmap maps tensors, not values of a trace")


def test_values_of_mapped_functions_in_an_export_are_told(snapshot: Callable[..., None]) -> None:
    with pytest.raises(CaptureError) as told:
        backquant.quantize(Mapped().eval(), calibration=[(torch.randn(3, 4),)], capture="export")
    snapshot("mapped", told.value)


class Broadcast(Mapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0])
        return self.fc(x) * (places[:, None] // 2 + places[None]).sum()


BY_HAND = {
    "write what torch.vmap": lambda *_: backquant.quantize(
        Broadcast().eval(), calibration=[(torch.randn(3, 4),)], capture="export"
    ),
}
