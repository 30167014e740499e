"""Operators that decomposition took apart are put together again."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backquant.graph.export import ExportedModel, capture_export
from backquant.operators.aten import AtenSpeller


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3), nn.LayerNorm(8)
        self.fc, self.bare = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x).transpose(1, 2))
        y = self.bare(torch.relu(self.fc(y)))  # three dimensions: view, addmm, view
        return F.softmax(y @ self.matrix, -1)


class Norm(nn.Module):
    def __init__(self, flipped: bool) -> None:
        super().__init__()
        self.weight, self.flipped = nn.Parameter(torch.rand(4)), flipped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled * self.weight if self.flipped else self.weight * scaled


def _captured(model: nn.Module, x: torch.Tensor, decomposed: bool = True) -> torch.fx.GraphModule:
    program = torch.export.export(model.eval(), (x,))
    if decomposed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            program = program.run_decompositions()
    return capture_export(ExportedModel(program), x, AtenSpeller()).module


def test_layers() -> None:
    model, x = Mixed(), torch.randn(2, 4, 9)
    module = _captured(model, x)
    with torch.no_grad():
        assert torch.allclose(module(x), model(x), atol=1e-6)
    kinds = Counter(
        type(module.get_submodule(str(node.target))).__name__
        for node in module.graph.nodes
        if node.op == "call_module"
    )
    assert kinds == {"Conv1d": 1, "LayerNorm": 1, "Linear": 2}
    left = [str(n.target) for n in module.graph.nodes if "aten" in str(n.target)]
    assert not any(name in str(left) for name in ("addmm", "convolution", "native", "_softmax")), (
        left
    )


@pytest.mark.parametrize("flipped", [False, True])
def test_root_mean_square(flipped: bool) -> None:
    model, x = Norm(flipped), torch.randn(3, 4)
    module = _captured(model, x, decomposed=False)
    [call] = [node for node in module.graph.nodes if node.op == "call_function"]
    assert call.target is F.rms_norm
    with torch.no_grad():
        assert torch.allclose(module(x), model(x), atol=1e-6)


def test_what_looks_like_a_norm_and_is_none() -> None:
    class Kept(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * (x * root) + root

    module = _captured(Kept(False), torch.randn(3, 4), decomposed=False)
    assert all(node.target is not F.rms_norm for node in module.graph.nodes)
