"""Weights of four bits alone, on XNNPACK."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import backquant

# It is built for one PyTorch: beside others tools/torch_versions.py leaves this file out.
if TYPE_CHECKING:
    import executorch.exir  # noqa: F401


def test_the_kernels_are_read_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = torch.randn(2, 64)
    quantized = backquant.quantize(model, x, backend="xnnpack", weights="int4", group_size=32)
    exported = backquant.export(quantized, tmp_path / "m.pte")
    of_four = [use.kernel for use in exported.kernels if use.dtype == "int4"]
    assert len(of_four) == 2, exported.kernels
    assert all("XNNPACK FullyConnected" in kernel for kernel in of_four)
