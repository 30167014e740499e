"""Linear layers that read images, channels last: what a convolution made reaches them by four axes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import backquant
from backquant.deploy.session import load_exported


class Gated(nn.Module):
    """The block of MambaOut: a convolution over some channels between two linear layers, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.wide = nn.Linear(8, 24)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.narrow = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        gate, same, mixed = self.wide(x).split((12, 8, 4), -1)
        mixed = self.conv(mixed.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.narrow(nn.functional.gelu(gate) * torch.cat((same, mixed), -1))


def test_a_gated_block_runs_on_integers_in_the_delegate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Gated().eval(), torch.randn(2, 3, 16, 16)
    made = backquant.quantize(model, data, backend="xnnpack", calibration=[data], slower="keep")
    exported = backquant.export(made, tmp_path / "m.pte", to="executorch", require=1.0)
    assert exported.integer_share == 1.0
    [found] = load_exported(tmp_path / "m.pte", 1).run([data.numpy()])
    wanted = made(data)
    assert (torch.from_numpy(found) - wanted).abs().max() < 0.05 * wanted.abs().max()
