"""Layouts of weights: what is computed of weights beside them."""

from __future__ import annotations

import pytest
import torch

from backquant.native.packing import row_sums


@pytest.mark.parametrize("shape", [(3, 5), (700, 64, 3, 3), (2, 1 << 19), (1, 1), (4, 0)])
def test_row_sums_in_parts(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    weight = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    assert torch.equal(row_sums(weight), weight.flatten(1).sum(1, dtype=torch.int64))
