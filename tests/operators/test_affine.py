"""Constants behind layers, in the layers' weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import backquant
from backquant.graph import GraphRewriter
from backquant.graph.shapes import GraphValues
from backquant.operators.computed_parameters import fold_affine

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (2, 4, 9), -2),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 9), -3),
    "conv2d without a batch": (lambda: nn.Conv2d(4, 6, 3, bias=False), (4, 9, 9), -3),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2), (1, 2, 4, 4, 4), -4),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5), -3),
    "transposed in groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 5), -2),
    "linear": (lambda: nn.Linear(5, 6), (2, 3, 5), -1),
}


class Behind(nn.Module):
    """A layer, and what a function makes of its output."""

    def __init__(
        self, layer: nn.Module, function: Callable[[Tensor, Tensor, Tensor], Tensor], axis: int
    ):
        super().__init__()
        self.layer, self.function = layer, function
        shape = [6] + [1] * (-axis - 1)
        self.scale = nn.Parameter(torch.randn(shape))
        self.register_buffer("shift", torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.scale, self.shift)


def folded(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, int]:
    module = fx.symbolic_trace(model.eval())
    count = GraphRewriter(module, values=GraphValues(module, (x,))).apply(fold_affine)
    module.recompile()
    return module, count


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer(name: str) -> None:
    torch.manual_seed(0)
    make, shape, axis = LAYERS[name]
    model = Behind(make(), lambda y, scale, shift: (2 - y.mul(scale)) / 3 + shift, axis)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(shape)
    module, count = folded(model, x)
    assert count == 1
    assert [node.name for node in module.graph.nodes] == ["x", "layer", "output"]
    assert torch.allclose(module(x), model(x), atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "read twice": lambda y, scale, shift: y * scale + y,
    "its square": lambda y, scale, shift: y * y,
    "the reciprocal": lambda y, scale, shift: 1 / y,
    "with a factor": lambda y, scale, shift: torch.add(y, shift, alpha=2),
    "divided by nothing": lambda y, scale, shift: y / 0.0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_stays(name: str) -> None:
    x = torch.randn(1, 4, 6, 6)
    assert folded(Behind(nn.Conv2d(4, 6, 3, padding=1), OTHERS[name], -3), x)[1] == 0


@pytest.mark.parametrize("axis", [-1, -2, -4, -5])
def test_constants_of_another_axis_stay(axis: int) -> None:
    model = Behind(nn.Conv2d(4, 6, 3, padding=1), lambda y, scale, shift: y + shift, axis)
    assert folded(model, torch.randn(6, 4, 6, 6))[1] == 0


def test_a_layer_called_twice_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x) * 2)

    assert folded(Twice(), torch.randn(2, 3))[1] == 0


def test_the_layer_is_then_fused_with_what_follows() -> None:
    """As in models of PaddlePaddle: a convolution, its scale and shift, an activation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Behind(nn.Conv2d(3, 6, 3), lambda y, scale, shift: y * scale + shift, -3), nn.ReLU()
    ).eval()
    x = torch.randn(2, 3, 12, 12)
    quantized = backquant.quantize(model, x, calibration=[x], slower="keep")
    assert [kernel.kernel for kernel in quantized.kernels] == ["onednn.qconv2d_pointwise(relu)"]
    with torch.no_grad():
        assert torch.allclose(quantized(x), model(x), atol=0.05 * float(model(x).abs().max()))


def test_layer_scale_behind_a_permutation() -> None:
    """ConvNeXt's, and dropout that does nothing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)
            self.gamma = nn.Parameter(torch.randn(6, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.fc(x)).permute(0, 3, 1, 2) * self.gamma

    x = torch.randn(2, 6, 6, 4)  # as many rows as channels
    model = Block()
    module, count = folded(model, x)
    assert count == 1
    assert [n.name for n in module.graph.nodes] == ["x", "fc", "drop", "permute", "output"]
    assert torch.allclose(module(x), model(x), atol=1e-6)
