"""The kernels for images, compiled, beside PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.native.plan import has_kernels
from backquant.runtime.compiled import images
from backquant.runtime.compiled.program import compile_graph

pytestmark = [
    pytest.mark.xdist_group("compiled"),
    pytest.mark.skipif(not has_kernels(), reason="they are for AVX-512 VNNI"),
]


class Everything(nn.Module):
    """Each operator, on channels that fill no register, one, and more than a gate takes at a time."""

    def __init__(self) -> None:
        super().__init__()
        # called as the kernels call their own constants
        self.register_buffer("scale", torch.randn(21 + 64 + 300, 1))
        self.register_buffer("shift", torch.randn(21 + 64 + 300, 1) * 40 + 100)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        parts = [x, y, z]
        return (
            images.rescaled(parts, self.scale, self.shift, 7, 240),
            images.joined(parts, [0.7131, 1.0, 2.1173], [9.413, 0.0, -30.217], 0, 255),
            images.gated(z, gate, [120.0, 30.0, 55.0], 0.011, 3, 255),
            *(images.averaged(part) for part in parts),
            *(images.shuffled(part) for part in (y, z)),
        )


def integers(*size: int) -> torch.Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8)


def test_they_are_right() -> None:
    sizes = (21, 64, 300)
    model = Everything()
    given: tuple[Any, ...] = tuple(integers(2, n, 7, 9) for n in sizes)
    given = (*given, integers(2, 300, 1, 1))
    program = compile_graph(fx.symbolic_trace(model), given, None, {})
    for name, count in (("join", 2), ("gate", 1), ("average", 3), ("shuffle", 2)):
        assert program.kernels[f"backquant.{name}"] == count
    for wanted, found in zip(model(*given), program(given), strict=True):
        off = (wanted.int() - found.int()).abs()
        assert off.max() <= 1  # ties, and what the order of operations decides
        assert (off > 0).float().mean() < 5e-3
