"""Generated programs: what changes in place is seen by all who read it later, in the quantized model too."""

from __future__ import annotations

import pytest
import torch

import backquant
from backquant.errors import CaptureError
from generated.check import ENGINES
from generated.programs import draw

PROGRAMS = 6  # per engine


def _decibels(wanted: torch.Tensor, found: torch.Tensor) -> float:
    noise = (wanted - found).square().sum().clamp(min=1e-20)
    return float(10 * torch.log10(wanted.square().sum() / noise))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES)
def test_programs(engine: str) -> None:
    far, refused = [], 0
    for seed in range(ENGINES.index(engine), PROGRAMS * len(ENGINES), len(ENGINES)):
        model, shape = draw(seed)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            wanted = model(x.clone())
        if not 1e-2 < float(wanted.abs().max()) < 1e4:
            continue
        try:
            made = backquant.quantize(model, x, backend=engine, calibration=[x], slower="keep")
        except CaptureError:
            refused += 1
            continue
        far += [seed for _ in range(3) if _decibels(wanted, made(x.clone())) < 12]
    assert far == [] and refused <= 1
