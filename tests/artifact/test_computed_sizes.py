"""Numbers made of sizes may be repeats; anything that may be a tensor may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import backquant
from backquant.artifact.operators import is_size
from backquant.errors import ArtifactError


class Windows(nn.Module):
    """As timm's GC ViT: queries of the whole image are repeated for each of its windows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        query = self.query(image).repeat_interleave(x.shape[0] // image.shape[0], dim=0)
        return query * self.key(x)


def test_repeats_that_sizes_make_are_stored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4), torch.randn(2, 4)
    result = backquant.quantize(Windows().eval(), x, calibration=[x], slower="keep")
    backquant.save(result, tmp_path / "model.bq")
    other = torch.randn(9, 4), torch.randn(3, 4)
    assert torch.equal(backquant.load(tmp_path / "model.bq")(*other), result(*other))


def test_repeats_that_values_make_are_refused(tmp_path: Path) -> None:
    class ByValue(Windows):
        def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            repeats = x.shape[0] // image.shape[0] * torch.ones(2, dtype=torch.long)
            return self.query(image).repeat_interleave(repeats, dim=0) * self.key(x)

    x = torch.randn(6, 4), torch.randn(2, 4)
    result = backquant.quantize(ByValue().eval(), x, calibration=[x], slower="keep")
    with pytest.raises(ArtifactError, match="repeats that is computed"):
        backquant.save(result, tmp_path / "model.bq")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda x: x.size()[1] + 2 * x.size(0), True),
        (lambda x: x.shape[0] % 3 - 1, True),
        (lambda x: x.size(0) * x, False),
        (lambda x: x[0] * 2, False),
        (lambda x: x.size(0) / 2, False),
        (lambda x: sum([x.size(0)] * 200), False),  # more than is looked at
    ],
)
def test_what_is_made_of_sizes(found: Any, expected: bool) -> None:
    graph = symbolic_trace(lambda x: x.repeat(found(x))).graph
    [repeat] = graph.find_nodes(op="call_method", target="repeat")
    assert is_size(repeat.args[1]) == expected
