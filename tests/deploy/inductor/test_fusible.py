"""Layers in the forms that Inductor's matcher takes give the same values; ``test_target`` exports them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.inductor.fusible import made_fusible
from backquant.deploy.portable import portable
from backquant.deploy.program import export_program
from backquant.deploy.session import load_exported


class Overlooked(nn.Module):
    """A convolution called twice, two layers with a transposed input, a batch norm over flattened rows."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(12, 12, 3, padding=1)
        self.query, self.key = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(x)
        y = (y + self.shared(y.tanh())).flatten(2).transpose(1, 2)
        y = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2), -1) @ y
        z = self.out(y)
        return self.norm(z.flatten(0, 1)).reshape_as(z) + z


def test_values_are_the_same_at_any_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 12, 4, 4)
    model = backquant.quantize(Overlooked().eval(), backend="inductor_x86", calibration=[x])
    module = portable(model.graph_module, QDQRules())
    made = made_fusible(export_program(module, (x,), {}, {"x": {0: "batch"}}))
    names = {
        node.name for node in made.exported.graph.nodes if "dequantize" not in str(node.target)
    }
    assert {made.origins[name] for name in names & set(made.origins)} <= {
        node.name for node in module.graph.nodes
    }
    for batch in (2, 5):
        other = torch.randn(batch, 12, 4, 4)
        assert torch.equal(made.exported.module()(other), module(other))


class Unfolding(nn.Module):
    """As timm's MobileViTv2: what is added to a convolution was reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).reshape(x.shape[0], 4, 4, -1)
        return y + self.second(y.tanh())


def test_an_addition_to_a_view_is_a_difference() -> None:
    """PyTorch 2.13 stops at it: "QConv Binary Inplace Fusion requires accum is not an alias"."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 2, 8)
    model = backquant.quantize(Unfolding().eval(), backend="inductor_x86", calibration=[x])
    module = portable(model.graph_module, QDQRules())
    program = made_fusible(export_program(module, (x,), {}, None))
    targets = [str(node.target) for node in program.exported.graph.nodes]
    assert "aten.sub.Tensor" in targets and "aten.add.Tensor" not in targets
    assert torch.equal(program.exported.module()(x), module(x))
    [sub] = [node for node in program.exported.graph.nodes if "aten.sub" in str(node.target)]
    assert program.origins[sub.name] == "second"


class Rows(nn.Module):
    """As timm's EfficientFormer: positions of an image as rows, and layers that are added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(4, 8, 1), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).sin().flatten(2).transpose(1, 2)
        y = y + self.first(y.tanh())
        return y + self.second(y.tanh())


def test_rows_that_are_not_in_one_piece_are_subtracted() -> None:
    """oneDNN of PyTorch 2.13 adds them by its reference kernel."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 2, 8)
    options = {"backend": "inductor_x86", "calibration": [x], "slower": "keep"}
    model = backquant.quantize(Rows().eval(), **options)
    module = portable(model.graph_module, QDQRules())
    program = made_fusible(export_program(module, (x,), {}, None))
    targets = [str(node.target) for node in program.exported.graph.nodes]
    assert (targets.count("aten.sub.Tensor"), targets.count("aten.add.Tensor")) == (1, 1)
    torch.testing.assert_close(program.exported.module()(x), module(x))


class Activated(nn.Module):
    """What a linear layer and its activation give is added to: by rows, by what was reshaped, by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        x = beside + self.first(x).relu()
        x = nn.functional.gelu(self.second(x)).flatten(0, 1) + beside.flatten(0, 1)
        return self.third(x).relu() + 1.0


def test_what_is_added_to_an_activation_is_subtracted(tmp_path: Path) -> None:
    """PyTorch 2.13 ends in an ``AssertionError``: the layer has its activation by then."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    options = {"backend": "inductor_x86", "calibration": [inputs], "slower": "keep"}
    model = backquant.quantize(Activated().eval(), **options)
    module = portable(model.graph_module, QDQRules())
    program = made_fusible(export_program(module, inputs, {}, None))
    targets = [str(node.target) for node in program.exported.graph.nodes]
    assert (targets.count("aten.sub.Tensor"), targets.count("aten.add.Tensor")) == (2, 1)
    torch.testing.assert_close(program.exported.module()(*inputs), module(*inputs))
    exported = backquant.export(model, tmp_path / "m.pt2")
    assert exported.integer_share == 1
    [found] = load_exported(tmp_path / "m.pt2", 1).run(inputs)
    torch.testing.assert_close(torch.as_tensor(found), module(*inputs), atol=1e-4, rtol=0)
